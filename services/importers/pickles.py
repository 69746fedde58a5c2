"""Reads pickles and joblib files of models: scanned first, then loaded with the classes that the scan allows.

file ─> decompressed, bounded ─> scan: every global that it names, without importing any ─> all on the list? ─> load
The scan unpickles into inert objects. It follows joblib's format, in which the bytes of arrays stand between the
opcodes of the pickle: a scanner that knows the opcodes alone loses its place there. A listed name is no proof that the
pickle is harmless, so the process that loads it runs in the sandbox. Sources: pickle.py; joblib/numpy_pickle.py.
"""

from __future__ import annotations

import bz2
import lzma
import pickle
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np

from millstream.services.errors import Code, Failure, invalid

#: libraries whose classes a pickle may name
LIBRARIES = ("sklearn", "numpy", "scipy", "xgboost", "lightgbm", "catboost")
#: bytes of a pickle after its decompression
UNPACKED_BYTES_MAX = 4 << 30
_CHUNK_BYTES = 1 << 20
_GLOBALS_MAX = 10_000
#: parts of module names below the libraries that no model needs: tests, builders and entry points
_UNWANTED = re.compile(
    r"(^|\.)(_?tests?|testing|conftest|distutils|f2py|__main__|setup|_build_utils|_pyinstaller)(\.|$)"
)
#: what else a model's pickle may name; functions are called by the pickle, and these only build values
_NAMED: dict[str, frozenset[str]] = {
    "builtins": frozenset(
        {"set", "frozenset", "list", "dict", "tuple", "object", "slice", "range", "complex", "bytearray", "int"}
        | {"float", "bool", "str", "bytes"}
    ),
    "__builtin__": frozenset({"set", "frozenset", "object", "complex", "bytearray", "slice", "xrange", "unicode"}),
    "collections": frozenset({"OrderedDict", "defaultdict", "deque", "Counter"}),
    "copyreg": frozenset({"_reconstructor"}),
    "copy_reg": frozenset({"_reconstructor"}),
    "_codecs": frozenset({"encode"}),
    "datetime": frozenset({"date", "datetime", "timedelta", "timezone"}),
    "decimal": frozenset({"Decimal"}),
}
#: functions of the libraries that pickles of their objects call
_FUNCTIONS = frozenset(
    {
        "numpy.core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy.core.numeric._frombuffer",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy._core.numeric._frombuffer",
        "numpy.ma.core._mareconstruct",
        "numpy.random._pickle.__randomstate_ctor",
        "numpy.random._pickle.__bit_generator_ctor",
        "numpy.random._pickle.__generator_ctor",
        "numpy.random.bit_generator.__pyx_unpickle_SeedSequence",
        "sklearn.neighbors._kd_tree.newObj",
        "sklearn.neighbors._ball_tree.newObj",
        "sklearn.metrics._dist_metrics.newObj",
        "sklearn._loss._loss.__pyx_unpickle_CyHalfBinomialLoss",
        "sklearn._loss._loss.__pyx_unpickle_CyHalfMultinomialLoss",
        "sklearn._loss._loss.__pyx_unpickle_CyHalfSquaredError",
    }
)
_CYTHON = re.compile(r"sklearn\.[\w.]+\.__pyx_unpickle_\w+")
_JOBLIB_WRAPPER = ("joblib.numpy_pickle", "NumpyArrayWrapper")


class Scan(NamedTuple):
    """What a pickle names.

    Args:
        names: (module, name) of every global.
        sklearn_version: of the scikit-learn that wrote it; empty: unknown.
    """

    names: frozenset[tuple[str, str]]
    sklearn_version: str


def load_pickle(path: Path, scratch: Path) -> tuple[Any, Scan]:
    """Scan and load the pickle or joblib file at `path`; runs the code of the classes that it names.

    Args:
        path: the file, which may be compressed as joblib does.
        scratch: folder for the decompressed bytes.

    Raises:
        Failure: INVALID for a pickle that is broken or names what is not on the list; TOO_LARGE.
    """
    plain = _decompress(path, scratch)
    scan = scan_pickle(plain)
    check_names(scan)
    with plain.open("rb") as file:
        return _Loader(file, scan.names).load(), scan


def scan_pickle(path: Path) -> Scan:
    """Return what the uncompressed pickle at `path` names, without importing any of it. Raises Failure(INVALID)."""
    with path.open("rb") as file:
        scanner = _Scanner(file, path.stat().st_size)
        try:
            scanner.load()
        except Failure:
            raise
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # a broken pickle raises anything
            cause = " ".join(str(error).split())[:200] or "it ends early"
            raise invalid(f"the pickle is broken or cut short: {type(error).__name__}: {cause}") from error
    return Scan(frozenset(scanner.names), scanner.sklearn_version)


def check_names(scan: Scan) -> None:
    """Raise Failure(INVALID) for the first global that a model's pickle may not name."""
    for module, name in sorted(scan.names):
        if not _is_listed(module, name):
            raise invalid(_refusal(module, name))


def _is_listed(module: str, name: str) -> bool:
    if name in _NAMED.get(module, frozenset()) or (module, name) == _JOBLIB_WRAPPER:
        return True
    if f"{module}.{name}" in _FUNCTIONS or _CYTHON.fullmatch(f"{module}.{name}"):
        return True
    return module.partition(".")[0] in LIBRARIES and not _UNWANTED.search(module) and "." not in name


def _refusal(module: str, name: str) -> str:
    what = f"{module}.{name}"[:200]
    if module == "__main__" or module.partition(".")[0] not in _DANGEROUS:
        return (
            f"the pickle needs {what}, which is no part of {', '.join(LIBRARIES[:-1])} or {LIBRARIES[-1]}: a custom "
            "class cannot be converted; rebuild that step with the library's own ones, or export the model to ONNX "
            "where it was made"
        )
    return f"the pickle calls {what}, which no model needs: it is refused, and nothing of it was executed"


_DANGEROUS = frozenset(
    {"os", "posix", "nt", "sys", "subprocess", "builtins", "__builtin__", "importlib", "runpy", "shutil", "socket"}
    | {"pty", "pickle", "_pickle", "marshal", "ctypes", "operator", "functools", "types", "code", "codecs", "_codecs"}
    | {"webbrowser", "urllib", "http", "requests", "pip", "timeit", "cProfile", "pdb", "bdb", "asyncio", "threading"}
    | {"multiprocessing", "tempfile", "io", "pathlib", "glob", "inspect", "copyreg", "copy_reg"}
    | set(LIBRARIES)
)


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
    """Reads pickles with joblib's arrays between the opcodes."""

    dispatch = _Unpickler.dispatch.copy()

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.file = file

    def load_build(self) -> None:
        super().load_build()
        if isinstance(self.stack[-1], _ArrayWrapper):
            wrapper = self.stack.pop()
            if not isinstance(wrapper.dtype, np.dtype):
                raise TypeError("an array has no datatype")
            self.stack.append(self.nested() if wrapper.dtype.hasobject else self._read_array(wrapper))

    dispatch[pickle.BUILD[0]] = load_build

    def persistent_load(self, pid: object) -> Any:
        raise invalid("the pickle refers to objects outside of it: save the model alone")

    def nested(self) -> Any:
        """Return the pickle that follows in the file: an array of objects."""
        raise NotImplementedError

    def array(self, wrapper: _ArrayWrapper, size_bytes: int) -> Any:
        """Return the array whose elements follow in the file."""
        raise NotImplementedError

    def _read_array(self, wrapper: _ArrayWrapper) -> Any:
        if wrapper.numpy_array_alignment_bytes is not None:
            self.file.seek(int.from_bytes(self.file.read(1), "little"), 1)
        return self.array(wrapper, wrapper.count * wrapper.dtype.itemsize)


class _Inert:
    """Stands for every object of a scanned pickle: accepts all calls and does nothing."""

    def __new__(cls, *_: object, **__: object) -> Self:
        return object.__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *_: object, **__: object) -> _Inert:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, _: object) -> None:
        pass

    def extend(self, _: object) -> None:
        pass

    def add(self, _: object) -> None:
        pass


class _Scanner(_Reader):
    """Unpickles into inert objects and notes the names."""

    def __init__(self, file: IO[bytes], size_bytes: int) -> None:
        super().__init__(file)
        self._size_bytes = size_bytes
        self.names: set[tuple[str, str]] = set()
        self.sklearn_version = ""
        scanner = self

        class Noted(_Inert):
            def __setstate__(self, state: object) -> None:
                version = state.get("_sklearn_version") if isinstance(state, dict) else None
                if isinstance(version, str):
                    scanner.sklearn_version = version[:40]

        self._stand_in = Noted

    def find_class(self, module: str, name: str) -> Any:
        if len(self.names) >= _GLOBALS_MAX:
            raise invalid(f"the pickle names more than {_GLOBALS_MAX} classes")
        self.names.add((module, name))
        if (module, name) == _JOBLIB_WRAPPER:
            return _ArrayWrapper
        return np.dtype if (module, name) == ("numpy", "dtype") else self._stand_in

    def get_extension(self, code: int) -> None:
        raise invalid("the pickle uses the registry of extensions, which is empty here")

    def nested(self) -> Any:
        return _same(self, _Scanner(self.file, self._size_bytes))

    def array(self, wrapper: _ArrayWrapper, size_bytes: int) -> Any:
        if size_bytes > self._size_bytes - self.file.tell():
            raise ValueError("an array ends after the file")
        self.file.seek(size_bytes, 1)
        return _Inert()


def _same(scanner: _Scanner, inner: _Scanner) -> Any:
    """Scan with `inner`, whose names are those of `scanner`."""
    inner.names = scanner.names
    inner.load()
    return _Inert()


class _Loader(_Reader):
    """Unpickles with the names that the scan found and that are listed.

    Of the libraries it calls classes and `_FUNCTIONS` alone. Other functions of scikit-learn may be values, such as the
    score function of a feature selection.
    """

    dispatch = _Reader.dispatch.copy()

    def __init__(self, file: IO[bytes], names: frozenset[tuple[str, str]]) -> None:
        super().__init__(file)
        self._names = names
        self._callable: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._names or not _is_listed(module, name):
            raise invalid(_refusal(module, name))
        if (module, name) == _JOBLIB_WRAPPER:
            return _ArrayWrapper
        try:
            found = super().find_class(module, name)
        except (ModuleNotFoundError, AttributeError) as error:
            raise invalid(f"the pickle needs {module}.{name}, which the library here does not have: {error}") from error
        path = f"{module}.{name}"
        if module.partition(".")[0] not in LIBRARIES or path in _FUNCTIONS or _CYTHON.fullmatch(path):
            self._callable.append(found)
        elif not isinstance(found, type | np.ufunc) and not module.startswith("sklearn."):
            raise invalid(_refusal(module, name))
        return found

    def load_reduce(self) -> None:
        self._check_call(self.stack[-2])
        super().load_reduce()

    dispatch[pickle.REDUCE[0]] = load_reduce

    def _instantiate(self, klass: Any, args: Any) -> None:
        self._check_call(klass)
        super()._instantiate(klass, args)

    def _check_call(self, function: Any) -> None:
        if not isinstance(function, type) and all(function is not listed for listed in self._callable):
            name = getattr(function, "__qualname__", type(function).__name__)
            raise invalid(f"the pickle calls {str(name)[:200]}, which is no class: it is refused")

    def get_extension(self, code: int) -> None:
        raise invalid("the pickle uses the registry of extensions, which is empty here")

    def nested(self) -> Any:
        return _Loader(self.file, self._names).load()

    def array(self, wrapper: _ArrayWrapper, size_bytes: int) -> Any:
        content = self.file.read(size_bytes)
        if len(content) != size_bytes:
            raise ValueError("an array ends after the file")
        array = np.frombuffer(bytearray(content), dtype=wrapper.dtype)
        if wrapper.order == "F":
            return array.reshape(tuple(wrapper.shape)[::-1]).transpose()
        return array.reshape(wrapper.shape)
