"""A worker's side of an instance in a process of its own: what every backend of such instances shares.

run ─> tensors ─> InstanceProcess.run ─> arrays, checked against the signature      terminate ─> SIGINT, then SIGKILL
A process that ended is `lost`: the reconciler unloads the instance and loads it again, beside the runs of the others.
"""

from __future__ import annotations

import resource
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from millstream.plugins.children.arrays import to_array, to_tensor
from millstream.plugins.children.confined import INVALID, MEMORY, TERMINATED
from millstream.plugins.children.message_channel import Message, TensorData
from millstream.plugins.children.process import EndedError, InstanceProcess, RunError
from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import BYTES, NUMPY
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.process.printable import printable
from millstream.services.process.process_memory import memory_use
from millstream.workers.backends.base import Array, InstanceEnded, OutOfMemory, RunRequest, Stop, Terminated
from millstream.workers.backends.engine_parts import CheckedInputs, check_not_ended

#: where neither the worker nor the machine limits the memory of a process
UNLIMITED_BYTES = 1 << 46
#: answers behind each other in the shared memory, all in use; further ones are copied
LENT_ANSWERS_MAX = 3
TEXT_CHARACTERS_MAX = 1000  # of the error of one request
#: for an instance that is unloaded to end by itself
FINALIZE_S = 1.0


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
        with self._exchange():
            answer, lend = self._run(inputs)
            outputs = self._arrays(answer.tensors, copy=not lend)
            if lend:
                self._lent.note(outputs, answer.ends)
            return outputs

    def _run(self, inputs: Mapping[str, Array], **header: Any) -> tuple[Message, bool]:
        """Return the answer of a run, and whether its arrays may be views of the shared memory."""
        self._checked.check(inputs)
        asked = [to_tensor(name, self._specs[name], array) for name, array in inputs.items()]
        if self._child.ended:
            raise Failure(Code.UNAVAILABLE, f"{self._title}: {self._child.ended}", retry_after_s=1)
        begin = self._lent.free_from()
        answer = self._child.run(asked, begin, **header)
        return answer, begin < answer.ends and self._lent.may_lend(begin, answer.ends)

    def _arrays(self, tensors: Sequence[TensorData], *, copy: bool) -> list[Array]:
        """Return the outputs among tensors. Raises ValueError."""
        answered = {tensor.name: tensor for tensor in tensors}
        return [output_of(answered, spec, copy=copy) for spec in self._outputs]

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Raise what a run raises in the block as a Failure."""
        child = self._child
        try:
            yield
        except RunError as error:
            raise self._failure(error) from error
        except ValueError as error:
            raise Failure(Code.MODEL, self._text(f"its answer cannot be read: {error}")) from error
        except MemoryError as error:
            raise OutOfMemory(self._text("there is no memory for its answer")) from error
        except EndedError as error:
            if child.terminated:
                raise Terminated from error
            raise InstanceEnded(self._text(str(error))) from error

    def _failure(self, error: RunError) -> Failure:
        if error.kind == TERMINATED:
            return Terminated()
        if error.kind == MEMORY:
            return OutOfMemory(self._text(str(error)))
        return Failure(Code.INVALID if error.kind == INVALID else Code.MODEL, self._text(str(error)))

    def _text(self, text: str) -> str:
        """Return the message of a failure."""
        return f"{self._title}: {text}"

    def end(self, why: str) -> None:
        self._child.kill(why)

    def terminate(self) -> None:
        self._child.interrupt()

    def rebuild(self) -> None:
        """Do nothing: what a run took that found no memory was freed when it failed, in its own process."""

    def close(self) -> None:
        self._child.close()


class RequestsInstance(ChildInstance):
    """An instance whose process answers each request of a run by itself. Failures have its own words alone."""

    takes_requests = True
    on_metrics: Callable[[Any], None] = staticmethod(lambda _: None)
    on_close: Callable[[], None] = staticmethod(lambda: None)

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        [answer] = self.run_requests(inputs, [RunRequest(_rows_of(inputs))])
        if isinstance(answer, Failure):
            raise answer
        return answer

    def run_requests(
        self, inputs: Mapping[str, Array], requests: Sequence[RunRequest]
    ) -> Sequence[Sequence[Array] | Failure]:
        """Run the requests whose rows are behind each other in `inputs`. Raises Failure: none has an answer."""
        with self._exchange():
            message, lend = self._run(inputs, requests=[one.rows_and_told() for one in requests])
            answers = list(self._answers(message, requests, copy=not lend))
            self.on_metrics(message.header.get("metrics", ()))
            if lend:
                self._lent.note([array for one in answers if isinstance(one, list) for array in one], message.ends)
            return answers

    def _answers(
        self, message: Message, requests: Sequence[RunRequest], *, copy: bool
    ) -> Iterator[list[Array] | Failure]:
        """Yield the answer of each request. Raises ValueError if there are others than asked for."""
        told, tensors = message.header.get("answers"), iter(message.tensors)
        if not isinstance(told, list) or len(told) != len(requests):
            raise ValueError(f"there are no answers of {len(requests)} requests")
        for one, request in zip(told, requests, strict=True):
            if "error" in one:
                code, text = one["error"]
                yield Failure(Code(code), printable(str(text)[:TEXT_CHARACTERS_MAX]))
                continue
            try:
                given = {tensor.name: tensor for tensor in [next(tensors) for _ in range(one["tensors"])]}
                wanted = request.told.get("outputs")
                yield [
                    output_of(given, spec, copy=copy)
                    if spec.name in given or wanted is None or spec.name in wanted
                    else _unwanted(spec, request.rows if self._rows else None)
                    for spec in self._outputs
                ]
            except StopIteration:
                raise ValueError("a tensor is missing") from None
            except ValueError as error:
                yield Failure(Code.MODEL, self._text(str(error)))

    def _text(self, text: str) -> str:
        return text

    def close(self) -> None:
        self._child.close(FINALIZE_S)
        self.on_close()


def _unwanted(spec: TensorSpec, rows: int | None) -> Array:
    """Return something in the place of an output that a request does not want, and its model did not make."""
    shape = [max(dim, 0) for dim in spec.shape] if rows is None else [rows, *(max(dim, 0) for dim in spec.shape[1:])]
    return np.full(shape, b"", object) if spec.datatype == BYTES else np.zeros(shape, NUMPY[spec.datatype])


def _rows_of(inputs: Mapping[str, Array]) -> int:
    return next((array.shape[0] for array in inputs.values() if array.ndim), 1)


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


def output_of(answered: Mapping[str, TensorData], spec: TensorSpec, *, copy: bool) -> Array:
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
