"""What backends and instances share: checks of a load and of inputs, shapes of clients, and a whole import."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import BYTES, NUMPY
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.repository.variants import Target
from millstream.workers.backends.base import (
    NO_OPTIONS,
    Array,
    Instance,
    Options,
    RunRequest,
    Stop,
    check_options,
    takes_requests,
)


class CpuBackend:
    """The parts of `Backend` that say: no memory of a device, nothing compiled; and what each load refuses first.

    `title` is the library's name in messages, `known` has the options of a load with their types.
    """

    name: str
    title: ClassVar[str]
    known: ClassVar[Mapping[str, type]]
    forwards = False

    def __init__(self, home: Path | None = None) -> None:
        """Keep no files in `home`."""

    def device_bytes(self, device: str) -> int:
        """Return 0: it runs on the CPU."""
        return 0

    def target(self, device: str) -> Target | None:
        """Return None: this backend keeps nothing that it compiles. Races compile by targets."""
        return None

    def compile(self, path: Path, folder: Path, signature: Signature, device: str, threads: int) -> Sequence[str]:
        """Raise Failure(UNSUPPORTED)."""
        raise Failure(Code.UNSUPPORTED, f"the backend {self.name} compiles nothing")

    def load(
        self,
        path: Path,
        signature: Signature,
        device: str,
        threads: int,
        stop: Stop | None = None,
        options: Options = NO_OPTIONS,
    ) -> Instance:
        """Load the file at `path`, as `open` does. Raises Failure: also INVALID for an option that is not known."""
        check_cpu(self.name, device)
        check_options(self.name, options, self.known)
        self.check_signature(signature)
        check_not_ended(stop)
        return self.open(path, signature, int(options.get("threads", threads)), options, stop)

    def check_signature(self, signature: Signature) -> None:
        """Raise Failure(MODEL) if the library has not the type of a tensor: text, for most."""
        for spec in (*signature.inputs, *signature.outputs):
            if spec.datatype == BYTES:
                raise Failure(Code.MODEL, f"{self.title} has no text: {spec.name!r} is {spec.datatype}")

    def open(self, path: Path, signature: Signature, threads: int, options: Options, stop: Stop | None) -> Instance:
        """Load a file that was not refused. Raises Failure(MODEL) or Failure(UNAVAILABLE)."""
        raise NotImplementedError


def check_cpu(backend: str, device: str) -> None:
    """Raise Failure(UNAVAILABLE) if `device` is not the CPU."""
    if device != "cpu":
        raise Failure(Code.UNAVAILABLE, f"the backend {backend} cannot use the device {device!r}; known: cpu")


def check_not_ended(stop: Stop | None) -> None:
    """Raise Failure(MODEL) with the reason if the end of the load was requested."""
    if stop is not None and stop.reason:
        raise Failure(Code.MODEL, stop.reason)


_OBJECT = np.dtype(object)


class CheckedInputs:
    """The inputs of a signature. `library` begins the messages."""

    def __init__(self, library: str, signature: Signature) -> None:
        self._library = library
        self._specs = {spec.name: spec for spec in signature.inputs}
        self._dtypes = {
            spec.name: _OBJECT if spec.datatype == BYTES else NUMPY[spec.datatype] for spec in signature.inputs
        }
        self._required = [spec.name for spec in signature.inputs if not spec.optional]

    def check(self, inputs: Mapping[str, Array]) -> None:
        """Raise Failure(MODEL) if an input is missing, unknown, or has another datatype, rank or fixed dimension."""
        missing = [name for name in self._required if name not in inputs]
        if missing:
            raise Failure(Code.MODEL, f"{self._library}: required inputs {missing} are missing")
        for name, array in inputs.items():
            spec = self._specs.get(name)
            if spec is None:
                raise Failure(Code.MODEL, f"{self._library}: the model has no input {name!r}")
            if array.dtype != self._dtypes[name] or not _fits(spec, array):
                raise Failure(
                    Code.MODEL,
                    f"{self._library}: input {name!r} is {spec.datatype} {list(spec.shape)}, not {array.dtype} "
                    f"{list(array.shape)}",
                )


def _fits(spec: TensorSpec, array: Array) -> bool:
    if spec.model_shape is not None:  # the caller has reshaped it for the model
        return True
    return array.ndim == len(spec.shape) and all(
        dim in {-1, size} for dim, size in zip(spec.shape, array.shape, strict=True)
    )


@contextmanager
def whole_import(*packages: str) -> Iterator[None]:
    """Import `packages` in the block; if that fails, forget those of their modules that it had imported.

    An import may fail for want of memory, half way. Python forgets the package alone: the next attempt would find its
    modules imported, which are then not attributes of the new package, and every later load in this process would fail.
    """
    before = set(sys.modules)
    try:
        yield
    except BaseException:
        for name in sys.modules.keys() - before:
            if name.partition(".")[0] in packages:
                del sys.modules[name]
        raise


class Reshaped:
    """An instance with the shapes of `signature`. Variable dimensions correspond in their order."""

    def __init__(self, instance: Instance, signature: Signature) -> None:
        self._instance = instance
        self._batching = signature.batching
        self._inputs = {spec.name: spec for spec in signature.inputs if spec.model_shape is not None}
        self._outputs = signature.outputs

    @property
    def size_bytes(self) -> int:
        return self._instance.size_bytes

    @property
    def lost(self) -> str:
        return self._instance.lost

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        return self._answered(self._instance.run(self._feed(inputs)))

    @property
    def takes_requests(self) -> bool:
        return takes_requests(self._instance)

    def run_requests(
        self, inputs: Mapping[str, Array], requests: Sequence[RunRequest]
    ) -> Sequence[Sequence[Array] | Failure]:
        by_request: Any = self._instance
        answers = by_request.run_requests(self._feed(inputs), requests)
        return [one if isinstance(one, Failure) else self._answered(one) for one in answers]

    def _feed(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {name: self._to_model(self._inputs.get(name), array) for name, array in inputs.items()}

    def _answered(self, outputs: Sequence[Array]) -> Sequence[Array]:
        return [
            array if spec.model_shape is None else self._to_client(spec, array)
            for spec, array in zip(self._outputs, outputs, strict=True)
        ]

    def _to_model(self, spec: TensorSpec | None, array: Array) -> Array:
        if spec is None or spec.model_shape is None:
            return array
        return _reshape(array, self._client_shape(spec), spec.model_shape, self._batching)

    def _to_client(self, spec: TensorSpec, array: Array) -> Array:
        assert spec.model_shape is not None
        try:
            return _reshape(array, spec.model_shape, self._client_shape(spec), self._batching)
        except (ValueError, IndexError) as error:
            raise Failure(
                Code.MODEL, f"output {spec.name!r} has the shape {list(array.shape)}, which is not {list(spec.shape)}"
            ) from error

    def _client_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """Return the shape that clients see, without rows."""
        return spec.shape[1:] if self._batching else spec.shape

    def limit(self, seconds: float) -> None:
        """Pass on the limit of the next run, to an instance that forwards its runs."""
        forwarding: Any = self._instance
        forwarding.limit(seconds)

    def end(self, why: str) -> None:
        """End the process of an instance that has its own."""
        apart: Any = self._instance
        apart.end(why)

    def terminate(self) -> None:
        self._instance.terminate()

    def rebuild(self) -> None:
        self._instance.rebuild()

    def close(self) -> None:
        self._instance.close()


def _reshape(array: Array, current: tuple[int, ...], target: tuple[int, ...], batching: bool) -> Array:
    """Reshape from `current` to `target`, which do not include rows and have -1 for variable dimensions.

    Raises ValueError.
    """
    rows = array.shape[:1] if batching else ()
    inner = array.shape[len(rows) :]
    if len(inner) != len(current):
        raise ValueError(f"{len(inner)} dimensions instead of {len(current)}")
    sizes = iter([size for size, dim in zip(inner, current, strict=True) if dim == -1])
    return array.reshape((*rows, *(next(sizes) if dim == -1 else dim for dim in target)))
