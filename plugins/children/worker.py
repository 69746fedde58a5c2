"""A worker's side of an instance in a process of its own: what every backend of such instances shares.

run ─> tensors ─> InstanceProcess.run ─> arrays, checked against the signature      terminate ─> SIGINT, then SIGKILL
A process that ended is `lost`: the reconciler unloads the instance and loads it again, beside the runs of the others.
"""

from __future__ import annotations

import resource
import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from millstream.plugins.children.arrays import to_array, to_tensor
from millstream.plugins.children.confined import INVALID, MEMORY, TERMINATED
from millstream.plugins.children.message_channel import TensorData
from millstream.plugins.children.process import EndedError, InstanceProcess, RunError
from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.process.process_memory import memory_use
from millstream.workers.backends.base import Array, InstanceEnded, OutOfMemory, Stop, Terminated
from millstream.workers.backends.engine_parts import CheckedInputs, check_not_ended

#: where neither the worker nor the machine limits the memory of a process
UNLIMITED_BYTES = 1 << 46
#: answers behind each other in the shared memory, all in use; further ones are copied
LENT_ANSWERS_MAX = 3


class ChildInstance:
    """An instance in a process. Raises as `Backend.load` does.

    Args:
        start: starts its process.
        title: begins the messages of its failures.
    """

    def __init__(
        self, start: Callable[[], InstanceProcess], title: str, signature: Signature, stop: Stop | None
    ) -> None:
        self._title = title
        self._specs = {spec.name: spec.datatype for spec in signature.inputs}
        self._outputs = signature.outputs
        self._rows = signature.batching
        self._checked = CheckedInputs(title, signature)
        self._lent = LentMemory()
        check_not_ended(stop)
        try:
            self._child = start()
        except OSError as error:
            raise Failure(Code.UNAVAILABLE, f"{title}: its process cannot be started: {error.strerror}") from error
        if stop is not None:
            stop.on_request(lambda: self._child.kill(stop.reason))
        try:
            self.said = self._child.load()
        except (RunError, EndedError) as error:
            self._child.close()
            check_not_ended(stop)
            if isinstance(error, RunError) and error.kind == MEMORY:
                raise OutOfMemory(f"{title}: {error}") from error
            raise Failure(Code.MODEL, f"{title}: {error}") from error
        except BaseException:
            self._child.close()
            raise

    @property
    def lost(self) -> str:
        return self._child.ended

    @property
    def size_bytes(self) -> int:
        return self._child.watch.memory_bytes()

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        self._checked.check(inputs)
        child, asked = self._child, [to_tensor(name, self._specs[name], array) for name, array in inputs.items()]
        if child.ended:
            raise Failure(Code.UNAVAILABLE, f"{self._title}: {child.ended}", retry_after_s=1)
        try:
            begin = self._lent.free_from()
            answer = child.run(asked, begin)
            answered = {tensor.name: tensor for tensor in answer.tensors}
            lend = begin < answer.ends and self._lent.may_lend(begin, answer.ends)
            outputs = [_output(answered, spec, copy=not lend) for spec in self._outputs]
            if lend:
                self._lent.note(outputs, answer.ends)
            return outputs
        except RunError as error:
            raise self._failure(error) from error
        except ValueError as error:
            raise Failure(Code.MODEL, f"{self._title}: its answer cannot be read: {error}") from error
        except MemoryError as error:
            raise OutOfMemory(f"{self._title}: there is no memory for its answer") from error
        except EndedError as error:
            if child.terminated:
                raise Terminated from error
            raise InstanceEnded(f"{self._title}: {error}") from error

    def _failure(self, error: RunError) -> Failure:
        if error.kind == TERMINATED:
            return Terminated()
        if error.kind == MEMORY:
            return OutOfMemory(f"{self._title}: {error}")
        return Failure(Code.INVALID if error.kind == INVALID else Code.MODEL, f"{self._title}: {error}")

    def end(self, why: str) -> None:
        self._child.kill(why)

    def terminate(self) -> None:
        self._child.interrupt()

    def rebuild(self) -> None:
        """Do nothing: what a run took that found no memory was freed when it failed, in its own process."""

    def close(self) -> None:
        self._child.close()


class LentMemory:
    """Which part of the shared memory of answers is in use: large arrays are views of it, since the pages of new ones
    cost more than all that a run copies.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[weakref.ref[Array], int]] = []  # arrays, which any view keeps, and where they end

    def free_from(self) -> int:
        """Return where the next answer may begin: no array is there."""
        self._lent = [(array, end) for array, end in self._lent if array() is not None]
        return max((end for _, end in self._lent), default=0)

    @staticmethod
    def may_lend(begin: int, end: int) -> bool:
        """Whether an answer is lent: not for ever further behind arrays of which some are always in use."""
        return begin <= LENT_ANSWERS_MAX * (end - begin)

    def note(self, arrays: Sequence[Array], end: int) -> None:
        """Note the arrays of an answer."""
        owners = (array.base if isinstance(array.base, np.ndarray) else array for array in arrays)
        self._lent += [(weakref.ref(owner), end) for owner in owners]


def _output(answered: Mapping[str, TensorData], spec: TensorSpec, *, copy: bool) -> Array:
    """Return the array of an output. Raises ValueError if it is missing, or not what the signature says."""
    tensor = answered.get(spec.name)
    if tensor is None:
        raise ValueError(f"there is no output {spec.name!r}")
    if tensor.datatype != spec.datatype:
        raise ValueError(f"output {spec.name!r} is {tensor.datatype[:20]}, not {spec.datatype}")
    array = to_array(tensor, copy=copy)
    if not array.size and array.ndim == len(spec.shape):  # lists without a row say nothing of its length
        array = array.reshape([got if dim < 0 else dim for dim, got in zip(spec.shape, array.shape, strict=True)])
    return array


def memory_bytes_max() -> int:
    """Return the memory that a new process may take: what this worker may still take itself."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return UNLIMITED_BYTES if limit == resource.RLIM_INFINITY else max(1 << 20, limit - memory_use().data)
