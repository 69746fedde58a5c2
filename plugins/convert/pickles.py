"""Imports models of scikit-learn from pickles and joblib files.

file ─> decompressed, bounded ─> unpickled: names are on the list (listed_types), and opcodes only rebuild objects

There is no scan before: the unpickler that loads the file is the one that refuses. It makes instances without their
constructors, calls what is listed as callable, sets state on what it made itself, and fills lists, sets and
dictionaries. A listed class may still be wrong about a hostile state, so the process that loads it runs in the sandbox.
It follows joblib's format, in which the bytes of arrays stand between the opcodes of the pickle.
Sources: pickle.py; joblib/numpy_pickle.py.
"""

from __future__ import annotations

import bz2
import lzma
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from millstream.plugins.convert.base import SCRATCH, Imported, Importer
from millstream.plugins.convert.listed_types import Use, find_listed, new_instance, refusal, set_state
from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.file_kind import PICKLE_REFUSAL, content_head, is_pickle
from millstream.services.ingest.importers import ImportOptions, Source

#: bytes of a pickle after its decompression
UNPACKED_BYTES_MAX = 4 << 30
_CHUNK_BYTES = 1 << 20
_JOBLIB_WRAPPER = ("joblib.numpy_pickle", "NumpyArrayWrapper")
#: modules that the pickle of an estimator names near its beginning
_MODULES = (b"sklearn", b"xgboost", b"lightgbm", b"catboost")
#: modules that only pickles of other frameworks name
_OTHERS = (b"torch", b"keras", b"tensorflow", b"jax")


class PickleImporter(Importer):
    """Imports pickles and joblib files."""

    name = "scikit-learn"
    extra = "scikit-learn"
    modules = ("sklearn", "skl2onnx")
    rehearsal = "millstream.plugins.convert.scikit_conversion:load_scikit_learn"

    def recognises(self, source: Source) -> bool:
        if not source.path.is_file():
            return False
        head = content_head(source.path)
        return is_pickle(head) and any(module in head for module in _MODULES) and not any(m in head for m in _OTHERS)

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        from millstream.plugins.convert.scikit_conversion import check_state, convert_estimator

        if not options.allow_pickle:
            raise invalid(PICKLE_REFUSAL)
        model = load_pickle(source.path, source.folder / SCRATCH, check_state)
        return convert_estimator(model, source.folder)


def load_pickle(path: Path, scratch: Path, check: Callable[[Any], None]) -> Any:
    """Return the object in the pickle or joblib file at `path`.

    Args:
        path: the file, which may be compressed as joblib does.
        scratch: folder for the decompressed bytes.
        check: called with each state before it is set; it may raise Failure.

    Raises:
        Failure: INVALID for a pickle that is broken or names what is not on the list; TOO_LARGE.
    """
    plain = _decompress(path, scratch)
    with plain.open("rb") as file:
        return read_pickle(file, plain.stat().st_size, check)


def read_pickle(file: IO[bytes], size_bytes: int, check: Callable[[Any], None]) -> Any:
    """Return the object in an uncompressed pickle of `size_bytes`. Other arguments and errors as of `load_pickle`."""
    try:
        return _Reader(file, size_bytes, check).load()
    except (Failure, MemoryError, RecursionError, OSError):
        raise
    except Exception as error:  # a broken pickle raises anything
        cause = " ".join(str(error).split())[:200] or "it ends early"
        raise invalid(f"the pickle is broken or cut short: {type(error).__name__}: {cause}") from error


def _decompress(path: Path, scratch: Path) -> Path:
    """Return a file with the plain pickle: `path` itself, or a new one in `scratch`. Raises Failure."""
    with path.open("rb") as file:
        head = file.read(6)
    for magic, decompressor in _COMPRESSIONS:
        if not head.startswith(magic):
            continue
        target = scratch / "pickle"
        left = UNPACKED_BYTES_MAX
        with target.open("wb") as out:
            for chunk in _chunks(path, decompressor):
                left -= len(chunk)
                if left < 0:
                    raise Failure(Code.TOO_LARGE, f"the pickle unpacks to more than {UNPACKED_BYTES_MAX} bytes")
                out.write(chunk)
        return target
    return path


def _chunks(path: Path, decompressor: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the content of a compressed file, in chunks of a bounded size."""
    try:
        with path.open("rb") as file:
            decompress = decompressor()
            while chunk := file.read(_CHUNK_BYTES):
                yield from decompress(chunk)
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise invalid(f"the compressed pickle is broken or cut short: {error}") from error


def _zlib() -> Callable[[bytes], Iterator[bytes]]:
    return partial(_bounded_zlib, zlib.decompressobj(zlib.MAX_WBITS | 32))  # with a zlib or a gzip header


def _bounded_zlib(decompressor: Any, chunk: bytes) -> Iterator[bytes]:
    while chunk:
        yield decompressor.decompress(chunk, _CHUNK_BYTES)
        chunk = decompressor.unconsumed_tail


def _bz2() -> Callable[[bytes], Iterator[bytes]]:
    return partial(_bounded, bz2.BZ2Decompressor())


def _lzma() -> Callable[[bytes], Iterator[bytes]]:
    return partial(_bounded, lzma.LZMADecompressor())


def _bounded(decompressor: Any, chunk: bytes) -> Iterator[bytes]:
    while not decompressor.eof:
        yield decompressor.decompress(chunk, _CHUNK_BYTES)
        if decompressor.needs_input:
            return
        chunk = b""


_COMPRESSIONS: tuple[tuple[bytes | tuple[bytes, ...], Callable[[], Callable[[bytes], Iterator[bytes]]]], ...] = (
    ((b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"), _zlib),
    (b"BZh", _bz2),
    ((b"\xfd7zXZ", b"]\x00\x00"), _lzma),
)


class _ArrayWrapper:
    """Stands for joblib's NumpyArrayWrapper: an array's dtype and shape, whose elements follow in the file."""

    shape: tuple[int, ...] = ()
    order: str = "C"
    dtype: Any = None
    numpy_array_alignment_bytes: int | None = None

    @property
    def count(self) -> int:
        """The number of elements. Raises ValueError for a shape that is none."""
        count = 1
        for size in self.shape:
            if not isinstance(size, int) or size < 0:
                raise ValueError("an array's shape is not made of numbers")
            count *= size
        return count


_Unpickler: Any = pickle._Unpickler  # in Python: the one in C has no place for joblib's arrays


class _Reader(_Unpickler):  # type: ignore[misc]
    """Reads pickles that name what is listed, and do with it what the list says."""

    dispatch = _Unpickler.dispatch.copy()

    def __init__(self, file: IO[bytes], size_bytes: int, check: Callable[[Any], None]) -> None:
        super().__init__(file)
        self.file = file
        self._size_bytes = size_bytes
        self._check = check
        #: id of each object that the pickle named -> its use; the objects outlive the reader
        self._uses: dict[int, Use] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == _JOBLIB_WRAPPER:
            self._uses[id(_ArrayWrapper)] = Use.REBUILD
            return _ArrayWrapper
        listed = find_listed(module, name)
        if listed is None:
            raise invalid(refusal(module, name))
        self._uses[id(listed.found)] = listed.use
        return listed.found

    def persistent_load(self, pid: object) -> Any:
        raise invalid("the pickle refers to objects outside of it: save the model alone")

    def get_extension(self, code: int) -> None:
        raise invalid("the pickle uses the registry of extensions, which is empty here")

    def _expect(self, named: Any, use: Use) -> None:
        if self._uses.get(id(named), 0) < use:
            what = getattr(named, "__qualname__", type(named).__name__)
            raise invalid(f"the pickle calls {str(what)[:200]}, which rebuilds no part of a model: it is refused")

    def load_reduce(self) -> None:
        self._expect(self.stack[-2], Use.CALL)
        super().load_reduce()

    dispatch[pickle.REDUCE[0]] = load_reduce

    def load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        self._expect(kind, Use.REBUILD)
        if arguments != ():
            raise invalid("the pickle makes an instance with arguments, which no part of a model needs")
        self.stack.append(new_instance(kind))

    dispatch[pickle.NEWOBJ[0]] = load_newobj

    def load_build(self) -> None:
        if id(self.stack[-2]) in self._uses or isinstance(self.stack[-2], type):
            raise invalid("the pickle changes a class or function: it is refused")
        state = self.stack.pop()
        if isinstance(self.stack[-1], _ArrayWrapper):
            self.stack.append(self._array(self.stack.pop(), state))
        else:
            self._check(state)
            set_state(self.stack[-1], state)

    dispatch[pickle.BUILD[0]] = load_build

    def _array(self, wrapper: _ArrayWrapper, state: Any) -> Any:
        """Return joblib's array, whose elements follow in the file: as a pickle, if they are objects."""
        wrapper.__dict__.update(state)
        if not isinstance(wrapper.dtype, np.dtype):
            raise TypeError("an array has no datatype")
        if wrapper.dtype.hasobject:
            return _Reader(self.file, self._size_bytes, self._check).load()
        if wrapper.numpy_array_alignment_bytes is not None:
            self.file.seek(int.from_bytes(self.file.read(1), "little"), 1)
        size_bytes = wrapper.count * wrapper.dtype.itemsize
        if size_bytes > self._size_bytes - self.file.tell():
            raise ValueError("an array ends after the file")
        array = np.frombuffer(bytearray(self.file.read(size_bytes)), dtype=wrapper.dtype)
        if wrapper.order == "F":
            return array.reshape(tuple(wrapper.shape)[::-1]).transpose()
        return array.reshape(wrapper.shape)

    def _fill(self, filled: Any, as_container: bool) -> None:
        """Refuse to call what merely has the name of a container's method."""
        if not as_container:
            raise invalid(f"the pickle fills a {type(filled).__name__[:80]} as a container, which it is not")

    def load_append(self) -> None:
        self._fill(self.stack[-2], type(self.stack[-2]) in (list, deque))
        super().load_append()

    dispatch[pickle.APPEND[0]] = load_append

    def load_appends(self) -> None:
        filled = self.metastack[-1][-1]
        self._fill(filled, type(filled) in (list, deque))
        super().load_appends()

    dispatch[pickle.APPENDS[0]] = load_appends

    def load_additems(self) -> None:
        filled = self.metastack[-1][-1]
        self._fill(filled, type(filled) is set)
        super().load_additems()

    dispatch[pickle.ADDITEMS[0]] = load_additems

    def load_setitem(self) -> None:
        self._fill(self.stack[-3], isinstance(self.stack[-3], dict))
        super().load_setitem()

    dispatch[pickle.SETITEM[0]] = load_setitem

    def load_setitems(self) -> None:
        filled = self.metastack[-1][-1]
        self._fill(filled, isinstance(filled, dict))
        super().load_setitems()

    dispatch[pickle.SETITEMS[0]] = load_setitems

    def refuse(self) -> NoReturn:
        """Refuse opcodes that no pickle of a model has: they call constructors of Python 2's classes."""
        raise invalid("the pickle makes objects in a way of Python 2: save the model again with Python 3")

    dispatch[pickle.INST[0]] = dispatch[pickle.OBJ[0]] = dispatch[pickle.NEWOBJ_EX[0]] = refuse
