"""A backend without a library: a JSON file says how long runs and loads take, what they hold and how they misbehave.

{"run_s": 0.01, "row_s": 0.001, "load_s": 2, "bytes": 50000000, "allocate": true}: a model of 50 MB that takes 2 s to
load, and 10 ms and 1 ms per row to run. {"load": "hang"}: its load never ends, with {"load_on": "cuda"} on GPUs alone.
{"fail_if": 13, "crash_if": 99}: a run
fails if an element is 13 and kills the process at 99. {"endless_if": 7, "hang_if": 8}: a run with a 7 lasts until it is
terminated, a run with an 8 cannot be terminated.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import BYTES, NUMPY
from millstream.services.model.signature import Signature, TensorSpec
from millstream.workers.backends.base import NO_OPTIONS, Array, Options, OutOfMemory, Stop, Terminated, check_options
from millstream.workers.backends.engine_parts import CheckedInputs, CpuBackend

FORMAT = "simulated"


class Behaviour(BaseModel):
    """The contents of a model file of this backend. An `…_if` is a number, or text for BYTES."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_s: float = Field(0, ge=0, description="Seconds of a run.")
    row_s: float = Field(0, ge=0, description="Further seconds of a run for each of its rows.")
    load_s: float = Field(0, ge=0, description="Seconds of a load.")
    load: Literal["succeed", "fail", "crash", "hang"] = Field(
        "succeed", description="How a load ends: with an instance, an error, the death of the process, or never."
    )
    load_on: str = Field("", description="Kind of device on which loads end so; on others they succeed. Empty: all.")
    bytes: int = Field(0, ge=0, le=1 << 40, description="Bytes of an instance.")
    peak_bytes: int = Field(0, ge=0, le=1 << 40, description="Further bytes during a load, and during a run.")
    device_bytes: int = Field(0, ge=0, le=1 << 40, description="Bytes of an instance on the device.")
    device_peak_bytes: int = Field(
        0, ge=0, le=1 << 40, description="Further bytes on the device from the load to the end of the first run."
    )
    close_s: float = Field(0, ge=0, description="Seconds until an instance is closed.")
    allocate: bool = Field(False, description="Whether the process really holds these bytes.")
    rows_fitting: int = Field(0, ge=0, description="A run of more rows finds no memory; 0: every run fits.")
    fail_if: float | str | None = Field(None, description="A run with an element equal to this fails.")
    crash_if: float | str | None = Field(None, description="A run with an element equal to this kills the process.")
    endless_if: float | str | None = Field(None, description="A run with an element equal to this must be terminated.")
    hang_if: float | str | None = Field(None, description="A run with an element equal to this cannot be terminated.")


def _contains(arrays: Mapping[str, Array], value: float | str | None) -> bool:
    if value is None:
        return False
    wanted: Any = value.encode() if isinstance(value, str) else value
    texts = isinstance(wanted, bytes)
    return any(bool((array == wanted).any()) for array in arrays.values() if (array.dtype == object) == texts)


def _kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    while True:
        time.sleep(1)


class SimulatedDevice:
    """What instances claim of the memory of an accelerator."""

    def __init__(self) -> None:
        self.taken: dict[SimulatedInstance, int] = {}


class SimulatedInstance:
    """Returns copies of the inputs, by position, where an output has the shape of its input; else zeros."""

    lost = ""

    def __init__(self, behaviour: Behaviour, signature: Signature, device: SimulatedDevice) -> None:
        self._behaviour = behaviour
        self._signature = signature
        self._device = device
        self._inputs = CheckedInputs("simulated", signature)
        self._terminated = threading.Event()
        self._closed = False
        self._memory = _allocated(behaviour, behaviour.bytes)
        self.size_bytes = behaviour.bytes
        device.taken[self] = behaviour.device_bytes + behaviour.device_peak_bytes

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        behaviour = self._behaviour
        if self._closed:
            raise Failure(Code.UNAVAILABLE, "the model was unloaded")
        self._inputs.check(inputs)
        rows = _rows(self._signature, inputs)
        if behaviour.rows_fitting and rows > behaviour.rows_fitting:
            raise OutOfMemory(f"simulated: no memory for {rows} rows")
        if _contains(inputs, behaviour.crash_if):
            _kill_process()
        if _contains(inputs, behaviour.hang_if):
            _hang()
        endless = _contains(inputs, behaviour.endless_if)
        peak = _allocated(behaviour, behaviour.peak_bytes)
        if self._terminated.wait(None if endless else behaviour.run_s + behaviour.row_s * rows):
            self._terminated.clear()
            raise Terminated
        del peak
        if self in self._device.taken:
            self._device.taken[self] = behaviour.device_bytes
        if _contains(inputs, behaviour.fail_if):
            raise Failure(Code.MODEL, f"simulated: an element equals {behaviour.fail_if}")
        return self._outputs(inputs, rows)

    def _outputs(self, inputs: Mapping[str, Array], rows: int) -> list[Array]:
        given = self._signature.inputs
        outputs: list[Array] = []
        for position, spec in enumerate(self._signature.outputs):
            source = given[position] if position < len(given) else None
            alike = source is not None and (source.datatype, source.shape) == (spec.datatype, spec.shape)
            if source is not None and alike and source.name in inputs:
                outputs.append(inputs[source.name].copy())
            else:
                outputs.append(_zeros(spec, rows if self._signature.batching else None))
        return outputs

    def terminate(self) -> None:
        self._terminated.set()

    def rebuild(self) -> None:
        """Do nothing: runs leave no memory behind."""

    def close(self) -> None:
        self._closed = True
        time.sleep(self._behaviour.close_s)
        self._memory = None
        self._device.taken.pop(self, None)


def _rows(signature: Signature, inputs: Mapping[str, Array]) -> int:
    """Return the rows of a run; 1 for a version that does not batch."""
    return max((len(array) for array in inputs.values()), default=0) if signature.batching else 1


def _zeros(spec: TensorSpec, rows: int | None) -> Array:
    """Return zeros, or empty texts, of the output's shape; variable dimensions but the rows are 1."""
    shape = [1 if dim < 0 else dim for dim in spec.shape]
    if rows is not None:
        shape[0] = rows
    return np.full(shape, b"", dtype=object) if spec.datatype == BYTES else np.zeros(shape, NUMPY[spec.datatype])


def _allocated(behaviour: Behaviour, size_bytes: int) -> Array | None:
    """Return memory of this size, every page of it written; None if the behaviour only claims its bytes.

    Raises OutOfMemory. It is mapped, so that it goes back to the system when freed: the allocator may take even large
    sizes from a heap that it keeps.
    """
    if not behaviour.allocate or not size_bytes:
        return None
    try:
        mapped = mmap.mmap(-1, 8 * math.ceil(size_bytes / 8), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (MemoryError, OSError, OverflowError) as error:
        raise OutOfMemory(f"simulated: no memory for {size_bytes} bytes") from error
    memory = np.frombuffer(mapped, np.int64)
    memory.fill(1)
    return memory


class Simulated(CpuBackend):
    """Loads a behaviour; accepts any device name and any number of threads."""

    name = "simulated"
    formats = frozenset({FORMAT})

    def __init__(self, home: Path | None = None) -> None:
        super().__init__(home)
        self._device = SimulatedDevice()

    def prepare(self, device: str) -> None:
        """Do nothing: there is no library."""

    def device_bytes(self, device: str) -> int:
        """Return what the instances on an accelerator claim together."""
        return 0 if device == "cpu" else sum(list(self._device.taken.values()))

    def load(
        self,
        path: Path,
        signature: Signature,
        device: str,
        threads: int,
        stop: Stop | None = None,
        options: Options = NO_OPTIONS,
    ) -> SimulatedInstance:
        """Load as the behaviour at `path` says. Raises Failure(MODEL) if it is invalid or its load fails."""
        check_options(self.name, options, {})
        behaviour = _read(path)
        ended = threading.Event()
        if stop is not None:
            stop.on_request(ended.set)
        end = behaviour.load if behaviour.load_on in {"", device.partition(":")[0]} else "succeed"
        if end == "crash":
            os.abort()  # not SIGKILL, which may come from outside and counts less
        if end == "hang":
            _hang()
        peak = _allocated(behaviour, behaviour.peak_bytes)
        instance = SimulatedInstance(behaviour, signature, self._device)
        if ended.wait(behaviour.load_s):
            instance.close()
            raise Failure(Code.MODEL, "simulated: the load was ended")
        del peak
        if end == "fail":
            instance.close()
            raise Failure(Code.MODEL, "simulated: the load fails")
        return instance


def _read(path: Path) -> Behaviour:
    try:
        return Behaviour.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise Failure(Code.MODEL, f"simulated: {path.name}: {why}") from error
