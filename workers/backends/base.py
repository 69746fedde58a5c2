"""The interface of a backend: one function that loads, one object that runs.

load(path, signature, device, threads) -> Instance ── run({name: array}) ──> [array, …] ── close()

The options of a load are what a backend takes beyond its defaults, which is how a compiled form is loaded. Their names
and types are checked: a library that ignored one would serve something else than what was measured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.signature import Signature
from millstream.services.repository.variants import Target

Value = str | int | float | bool
Options = Mapping[str, Value]

NO_OPTIONS: Options = MappingProxyType({})
THREADS_MAX = 1024


def check_options(backend: str, given: Options, known: Mapping[str, type]) -> None:
    """Raise Failure(INVALID) if an option is not one of `known` or has another type, or `threads` is out of range."""
    for name, value in given.items():
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise invalid(f"the backend {backend} has no option {name!r}; known: {names}")
        if type(value) is not known[name]:  # not isinstance: True is an int
            raise invalid(f"the option {name!r} of the backend {backend} is a {known[name].__name__}, not {value!r}")
    threads = given.get("threads", 1)
    if not 1 <= int(threads) <= THREADS_MAX:
        raise invalid(f"the option 'threads' is from 1 to {THREADS_MAX}, not {threads!r}")


Array = np.ndarray[Any, Any]


class OutOfMemory(Failure):
    """A run or a load found no memory; fewer rows may fit.

    Args:
        of_device: whether it was the memory of the accelerator.
    """

    def __init__(self, message: str, *, of_device: bool = False) -> None:
        super().__init__(Code.MODEL, message)
        self.of_device = of_device


class Terminated(Failure):
    """A run was ended by `Instance.terminate`."""

    def __init__(self) -> None:
        super().__init__(Code.MODEL, "the run was terminated")


class InstanceEnded(Terminated):
    """The process of an instance ended in a run, which nobody asked for: one of its requests may be the cause."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.message = reason


class Stop:
    """Lets another thread request the early end of a load or warm-up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end: Callable[[], None] = lambda: None
        self.reason = ""  # why it was requested; "": not requested

    def on_request(self, end: Callable[[], None]) -> None:
        """Call `end` when the end is requested, or now if it was requested already. Replaces the previous function."""
        with self._lock:
            self._end = end
            requested = bool(self.reason)
        if requested:
            end()

    def request(self, reason: str) -> None:
        """Request the end of the load. The first reason counts."""
        with self._lock:
            self.reason = self.reason or reason
            end = self._end
        end()


class Instance(Protocol):
    """A loaded variant on a device. Not thread-safe, except for `terminate`."""

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Run once on inputs by name; BF16 is uint16, BYTES are object arrays of `bytes`.

        Returns all outputs in the signature's order, with the same conventions. Raises Failure(MODEL) with the
        library's own message when the model fails on these inputs, OutOfMemory when there is no memory for them,
        InstanceEnded if the instance runs elsewhere and is `lost` since.
        """

    def terminate(self) -> None:
        """End the run in progress in another thread, as soon as the library can; that run raises Terminated.

        If the run ended before, the next run may raise Terminated at once.
        """

    def rebuild(self) -> None:
        """Load again, which frees the memory that earlier runs left behind. Raises Failure if that fails."""

    @property
    def size_bytes(self) -> int:
        """Bytes that an `InstanceApart` takes in its process; 0: it is none, or its process is gone. Takes < 1 ms.

        What an instance takes of the worker's own memory is measured by the worker (workers.footprint_meter).
        """

    @property
    def lost(self) -> str:
        """Why the instance cannot run any longer, such as that its server is gone; empty: it can. Cheap: polled."""

    def close(self) -> None:
        """Free everything."""


class InstanceApart(Instance, Protocol):
    """An instance in a process of its own, whose memory the worker counts while it runs."""

    def end(self, why: str) -> None:
        """End its process, in another thread than its runs: it is `lost` for this reason."""


class RunRequest(NamedTuple):
    """A request of a run.

    Args:
        rows: of it; 1 for versions that do not batch.
        told: what its caller said beside its tensors, in JSON: `id`, `parameters`, `timeout`, names of `outputs`.
    """

    rows: int
    told: Mapping[str, Any] = MappingProxyType({})

    def rows_and_told(self) -> dict[str, Any]:
        """Return both as one document."""
        return {**self.told, "rows": self.rows}


class RequestsInstance(Instance, Protocol):
    """An instance that answers each request of a run by itself. Requests that nobody made never reach it."""

    takes_requests: bool

    def run_requests(
        self, inputs: Mapping[str, Array], requests: Sequence[RunRequest]
    ) -> Sequence[Sequence[Array] | Failure]:
        """Run requests whose rows are behind each other in `inputs`; return the outputs, or the failure, of each.

        Raises as `run` does, if there is an answer to none of them.
        """


def takes_requests(instance: Instance | None) -> bool:
    """Return whether an instance is a RequestsInstance."""
    return bool(getattr(instance, "takes_requests", False))


class StreamSink(Protocol):
    """Takes the answers to one request. Its methods may be called in any thread, and wait while nobody reads."""

    def part(self, outputs: Sequence[Array]) -> None:
        """Take one answer: all outputs in the signature's order, as of `Instance.run`."""

    def end(self, failure: Failure | None = None) -> None:
        """Take the end: no further answer comes. `failure`: why it is not the end that the model had in mind."""


class OpenStream(Protocol):
    """A request that runs. Its methods return at once, and may be called in any thread."""

    def taken(self, ordinal: int) -> None:
        """Note that the caller has the parts up to `ordinal`, which begins with 1: these leave the window."""

    def cancel(self) -> None:
        """Have the run end soon, and with it the stream: its caller is gone."""


class StreamingInstance(Instance, Protocol):
    """An instance that answers a request in parts (`Manifest.streams`), several requests at once.

    `run` answers with the first part alone: warm-ups and readiness probes need no more.
    """

    def open(self, inputs: Mapping[str, Array], window_bytes: int, sink: StreamSink) -> OpenStream:
        """Begin to run a request. Returns at once; the sink gets its end exactly once, also where it fails.

        `window_bytes`: of parts that the caller does not have yet; while they are more, the run waits.
        Raises Failure if it cannot begin.
        """


class Backend(Protocol):
    """An inference library. Importing its module must not import the library."""

    name: str
    formats: frozenset[str]  # values of Manifest.source_format that it loads
    forwards: bool  # whether its instances run elsewhere, and are told how long callers wait

    def prepare(self, device: str) -> None:
        """Import the library and start what all its instances share, so that the first load does not count it.

        Raises Failure(UNAVAILABLE) if the library is not installed.
        """

    def device_bytes(self, device: str) -> int:
        """Return the bytes of an accelerator's memory that this process uses; 0: a CPU, or not known. Takes < 1 ms."""

    def target(self, device: str) -> Target | None:
        """Return what `compile` compiles for; None: it compiles nothing for this device."""

    def compile(self, path: Path, folder: Path, signature: Signature, device: str, threads: int) -> Sequence[str]:
        """Write a compiled form of the model at `path` to `folder`; return the names of its files, the one to load
        first. Raises Failure.
        """

    def load(
        self,
        path: Path,
        signature: Signature,
        device: str,
        threads: int,
        stop: Stop | None = None,
        options: Options = NO_OPTIONS,
    ) -> Instance:
        """Load the model file at `path` on `device` ("cpu", "cuda:0", "tensorrt:0"). `stop` may end the load early.

        `options` are those of a compiled form; Failure(INVALID) for one that the backend does not know.
        Raises Failure(MODEL) if the model cannot be loaded, Failure(UNAVAILABLE) if the device cannot be used: a
        backend never falls back to another device by itself.
        """


def check_outputs(outputs: Sequence[Array], signature: Signature, rows: int) -> None:
    """Raise Failure(MODEL) if an output is missing, or a batching version did not return one row for each input row."""
    if len(outputs) != len(signature.outputs):
        raise Failure(Code.MODEL, f"the model returned {len(outputs)} outputs instead of {len(signature.outputs)}")
    if not signature.batching:
        return
    for spec, array in zip(signature.outputs, outputs, strict=True):
        if array.ndim == 0 or array.shape[0] != rows:
            raise Failure(
                Code.MODEL,
                f"output '{spec.name}' has shape {list(array.shape)} for {rows} rows: the version does not batch; "
                'upload it with the config {"batching": false}',
            )
