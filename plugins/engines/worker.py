"""What the engines share that run a compiled function on the CPU: the errors of loads and runs, names, and padding.

file ─> read ─> program                  run: inputs by name ─> checked ─> call ─> outputs in the signature's order
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import NUMPY
from millstream.services.model.onnxruntime_values import library_message
from millstream.services.model.signature import Signature
from millstream.services.process.process_memory import trim
from millstream.workers.backends.base import Array, OutOfMemory, Terminated
from millstream.workers.backends.engine_parts import CheckedInputs, whole_import

MESSAGE_CHARACTERS_MAX = 1000
DOCUMENT_BYTES_MAX = 1 << 20
NO_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|out of memory|not enough memory|bad_alloc|failed to allocate|can't allocate|alloc.* failed",
    re.IGNORECASE,
)
Document = TypeVar("Document", bound=BaseModel)


@contextmanager
def importing(library: str, extra: str, *packages: str) -> Iterator[None]:
    """Import a library in the block, whole or not at all. Raises Failure(UNAVAILABLE) with what to install."""
    try:
        with whole_import(*packages):
            yield
    except ImportError as error:
        why = f"{library} cannot be imported ({error}): install millstream[{extra}]"
        raise Failure(Code.UNAVAILABLE, why) from error


def reason(error: Exception, path: Path | None = None) -> str:
    """Return a library's message on one line, without the folder of `path`."""
    return library_message(error, path, MESSAGE_CHARACTERS_MAX) or type(error).__name__


class ProgramInstance:
    """A loaded program, whose inputs cannot be left out. `terminate` ends the next run: none can be ended early.

    A subclass sets `title`, the library's name in messages, and has `read` and `call`.
    """

    title: ClassVar[str]
    lost = ""
    size_bytes = 0

    def __init__(self, path: Path, signature: Signature) -> None:
        self._path = path
        self._signature = signature
        self._checked = CheckedInputs(self.title, signature)
        self._terminating = False
        self._program: Any = None
        self._open()

    def read(self, path: Path) -> Any:
        """Return the program of a file, for `call`. Raises anything."""
        raise NotImplementedError

    def call(self, program: Any, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs by name. Raises anything; Terminated if the run was ended."""
        raise NotImplementedError

    def document(self, kind: type[Document], path: Path) -> Document:
        """Return the document of a compiled model. Raises Failure(MODEL) if the file holds none."""
        with path.open("rb") as file:
            try:
                return kind.model_validate_json(file.read(DOCUMENT_BYTES_MAX))
            except ValidationError as error:
                raise Failure(Code.MODEL, f"{self.title}: {path.name} is no document of a compiled model") from error

    def _open(self) -> None:
        path = self._path
        try:
            self._program = self.read(path)
        except Failure as failure:
            if failure.code is Code.INVALID:
                raise Failure(Code.MODEL, f"{self.title}: {path.name}: {failure.message}") from failure
            raise
        except OSError as error:
            raise Failure(Code.MODEL, f"the model cannot be loaded: {path.name}: {error.strerror or error}") from error
        except MemoryError as error:
            raise OutOfMemory(f"there is no memory for the model: {path.name}") from error
        except Exception as error:
            if NO_MEMORY.search(str(error)):
                raise OutOfMemory(f"there is no memory for the model: {reason(error, path)}") from error
            raise Failure(Code.MODEL, f"{self.title} cannot load {path.name}: {reason(error, path)}") from error

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        if self._program is None:
            raise Failure(Code.UNAVAILABLE, "the model was unloaded")
        if self._terminating:
            self._terminating = False
            raise Terminated
        self._checked.check(inputs)
        missing = [spec.name for spec in self._signature.inputs if spec.name not in inputs]
        if missing:
            raise Failure(Code.MODEL, f"{self.title}: inputs {missing} are missing; they cannot be left out here")
        try:
            found = self.call(self._program, inputs)
            return [self._output(found[spec.name], spec.name, spec.datatype) for spec in self._signature.outputs]
        except Terminated:
            self._terminating = False
            raise
        except Failure:
            raise
        except MemoryError as error:
            raise OutOfMemory(f"{self.title}: out of memory") from error
        except Exception as error:
            said = reason(error)
            if NO_MEMORY.search(said):
                raise OutOfMemory(f"{self.title}: out of memory: {said}") from error
            raise Failure(Code.MODEL, f"{self.title}: {said}") from error

    def _output(self, array: Array, name: str, datatype: str) -> Array:
        if array.dtype != NUMPY[datatype]:
            raise Failure(Code.MODEL, f"{self.title}: output {name!r} is {array.dtype}, not {datatype}")
        return array

    def check_names(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Raise Failure(MODEL) if a program has other inputs or outputs than the signature; it may lack inputs."""
        known = {spec.name for spec in self._signature.inputs}
        if not set(inputs) <= known or sorted(outputs) != sorted(spec.name for spec in self._signature.outputs):
            raise Failure(Code.MODEL, f"{self.title}: {self._path.name} has other inputs or outputs than the signature")

    def terminate(self) -> None:
        self._terminating = True

    def rebuild(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        self._program = None
        trim()


def padded(array: Array, rows: int) -> Array:
    """Return `array` with its last row repeated up to `rows`; filled with zeros if it has no row."""
    if len(array) == rows:
        return array
    shape = (rows - len(array), *array.shape[1:])
    more = np.broadcast_to(array[-1:], shape) if len(array) else np.zeros(shape, array.dtype)
    return np.concatenate([array, more])
