"""A backend without a library, for tests: output i is input i; a JSON file says how it misbehaves.

{"sleep_s": 0.01, "fail_if": 13, "crash_if": 99}: each run sleeps, fails if an element is 13, kills the process at 99
{"endless_if": 7, "hang_if": 8}: a run with a 7 lasts until it is terminated, a run with an 8 cannot be terminated
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import BYTES
from millstream.services.model.signature import Signature
from millstream.workers.backends.base import Array, Stop, Terminated


class Behaviour(BaseModel):
    """The contents of a model file of this backend. An `…_if` is a number, or text for BYTES."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sleep_s: float = Field(0, ge=0, description="How long each run takes.")
    fail_if: float | str | None = Field(None, description="A run with an element equal to this fails.")
    crash_if: float | str | None = Field(None, description="A run with an element equal to this kills the process.")
    endless_if: float | str | None = Field(None, description="A run with an element equal to this must be terminated.")
    hang_if: float | str | None = Field(None, description="A run with an element equal to this cannot be terminated.")


def _holds(arrays: Mapping[str, Array], value: float | str | None) -> bool:
    if value is None:
        return False
    wanted: Any = value.encode() if isinstance(value, str) else value
    texts = isinstance(wanted, bytes)
    return any(bool((array == wanted).any()) for array in arrays.values() if (array.dtype == object) == texts)


class EchoInstance:
    """Copies inputs to outputs by position."""

    def __init__(self, behaviour: Behaviour, names: Sequence[str]) -> None:
        self._behaviour = behaviour
        self._names = names
        self._terminated = threading.Event()
        self.size_bytes = 0

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        if _holds(inputs, self._behaviour.crash_if):
            os.kill(os.getpid(), signal.SIGKILL)
        while _holds(inputs, self._behaviour.hang_if):
            time.sleep(1)
        endless = _holds(inputs, self._behaviour.endless_if)
        if self._terminated.wait(None if endless else self._behaviour.sleep_s):
            self._terminated.clear()
            raise Terminated
        if _holds(inputs, self._behaviour.fail_if):
            raise Failure(Code.MODEL, f"echo: an element equals {self._behaviour.fail_if}")
        missing = [name for name in self._names if name not in inputs]
        if missing:
            raise Failure(Code.MODEL, f"echo: required inputs {missing} are missing")
        return [inputs[name].copy() for name in self._names]

    def terminate(self) -> None:
        self._terminated.set()

    def rebuild(self) -> None:
        """Do nothing: runs leave no memory behind."""

    def close(self) -> None:
        self._names = ()


class Echo:
    """Loads a behaviour; accepts any device name and any number of threads."""

    name = "echo"

    def load(
        self, path: Path, signature: Signature, device: str, threads: int, stop: Stop | None = None
    ) -> EchoInstance:
        """Read the behaviour at `path`. Raises Failure(MODEL) if it is invalid, or outputs do not match inputs."""
        try:
            behaviour = Behaviour.model_validate(json.loads(path.read_bytes()))
        except (OSError, ValueError, ValidationError) as error:
            raise Failure(Code.MODEL, f"echo: {path.name}: {' '.join(str(error).split())}") from error
        pairs = zip(signature.inputs, signature.outputs, strict=False)
        alike = all((given.datatype == BYTES) == (taken.datatype == BYTES) for given, taken in pairs)
        if len(signature.inputs) != len(signature.outputs) or not alike:
            raise Failure(Code.MODEL, "echo: outputs must match inputs one by one")
        return EchoInstance(behaviour, [spec.name for spec in signature.inputs])
