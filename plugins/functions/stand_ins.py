"""Serves what converters refuse as it is, by the library that it was made for.

refused by an importer of `stands_in_for` ─> stands_in ─> trial (the adapter makes a function of it) ─> its document
A pickle runs in an environment of the versions that wrote it, as far as it says them.
"""

from __future__ import annotations

import bz2
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.services.ingest.importers import Importer, ImportOptions, Source

if TYPE_CHECKING:
    from millstream.services.ingest.report import Converted, Recognised
    from millstream.services.settings import Settings

_SCIKIT = "scikit-learn"
_TORCH_SERVE, _MANIFEST = "TorchServe", "MAR-INF/MANIFEST.json"
_MLFLOW, _MLMODEL = "MLflow", "MLmodel"
_DOCUMENT_BYTES_MAX = 1 << 20
#: handlers of TorchServe itself that torch_handlers provides, and that take requests of images
_PROVIDED = frozenset({"image_classifier"})
#: modules that a pickle names -> their packages
_PACKAGES: Mapping[bytes, str] = {
    b"xgboost": "xgboost", b"lightgbm": "lightgbm", b"catboost": "catboost", b"imblearn": "imbalanced-learn",
    b"category_encoders": "category-encoders", b"cloudpickle": "cloudpickle", b"feature_names_in_": "pandas",
}  # fmt: skip
#: the state of each estimator of scikit-learn ends with the release that wrote it (sklearn.base.__getstate__)
_RELEASE = re.compile(rb"_sklearn_version.{0,3}?(?:\x8c.|X.\0\0\0)(\d+\.\d+(?:\.\d+)?)", re.DOTALL)
_READ_BYTES, _READ_BYTES_MAX = 1 << 20, 1 << 30
_OVERLAP_BYTES = 64
_ALLOW = "push it with --allow-code (allow_code=true), too, and {} serves it as it is"
_WITHOUT_ONNX = (
    "In ONNX it would need no process and no environment of its own, and could be compiled: replace the steps that "
    "cannot be converted."
)


class PickleStandIn(Importer):
    """Serves estimators that have no form in ONNX."""

    name = "its own library"
    runs_code = True
    stands_in_for = frozenset({_SCIKIT})

    def recognises(self, source: Source) -> bool:
        return False

    def stands_in(self, source: Source, options: ImportOptions) -> str | None:
        if not options.allow_pickle:
            return None
        return "" if options.allow_code else _ALLOW.format("the library that it was made with")

    async def run(self, folder: Path, recognised: Recognised, options: ImportOptions, settings: Settings) -> Converted:
        from millstream.plugins.functions.trial import Tried, tried

        path = folder / recognised.path
        asked = Tried(path, "estimators", _SCIKIT, requirements=written_with(path), notes=(_WITHOUT_ONNX,))
        return await tried(folder, asked, settings)


class HandlerStandIn(Importer):
    """Serves archives of TorchServe by their handlers."""

    name = "TorchServe's handler"
    runs_code = True
    stands_in_for = frozenset({_TORCH_SERVE})

    def recognises(self, source: Source) -> bool:
        return False

    def stands_in(self, source: Source, options: ImportOptions) -> str | None:
        model = _archived(source.path)
        requirements = _requirements(source.path, model)
        return "" if has_handler(source.path, model, requirements) else None

    async def run(self, folder: Path, recognised: Recognised, options: ImportOptions, settings: Settings) -> Converted:
        from millstream.plugins.functions.function_packages import check_requirements
        from millstream.plugins.functions.trial import Tried, tried

        path = folder / recognised.path
        requirements = check_requirements(_requirements(path, _archived(path)))
        manifest = path / _MANIFEST
        asked = Tried(manifest, "archive_handlers", _TORCH_SERVE, requirements, beneath=True)
        return await tried(folder, asked, settings)


class PyfuncStandIn(Importer):
    """Serves folders of MLflow by MLflow."""

    name = "MLflow's pyfunc"
    runs_code = True
    stands_in_for = frozenset({_MLFLOW})

    def recognises(self, source: Source) -> bool:
        return False

    def stands_in(self, source: Source, options: ImportOptions) -> str | None:
        document = source.path / _MLMODEL
        with document.open("rb") as file:
            if b"python_function:" not in file.read(_DOCUMENT_BYTES_MAX):
                return None
        return "" if options.allow_code else _ALLOW.format("MLflow")

    async def run(self, folder: Path, recognised: Recognised, options: ImportOptions, settings: Settings) -> Converted:
        from millstream.plugins.functions.function_packages import check_requirements
        from millstream.plugins.functions.trial import Tried, tried

        path = folder / recognised.path
        requirements = check_requirements(_requirements(path, {"requirementsFile": "requirements.txt"}))
        asked = Tried(path / _MLMODEL, "pyfunc_models", _MLFLOW, requirements, notes=(_WITHOUT_ONNX,))
        return await tried(folder, asked, settings)


def has_handler(folder: Path, model: Mapping[str, Any], requirements: list[str]) -> bool:
    """Return whether the handler that an archive names is there, or provided."""
    name = str(model.get("handler") or "").partition(":")[0].removesuffix(".py").rpartition("/")[2]
    own = bool(name) and (folder / f"{name}.py").is_file()
    return own or name in _PROVIDED or any(line.startswith("torchserve") for line in requirements)


def _archived(folder: Path) -> Mapping[str, Any]:
    """Return the model that a manifest describes; empty: it describes none."""
    path = folder / _MANIFEST
    if not path.is_file() or path.stat().st_size > _DOCUMENT_BYTES_MAX:
        return {}
    try:
        model = json.loads(path.read_bytes()).get("model")
    except (ValueError, AttributeError, RecursionError):
        return {}
    return model if isinstance(model, dict) else {}


def _requirements(folder: Path, model: Mapping[str, Any]) -> list[str]:
    name = model.get("requirementsFile")
    path = folder / Path(str(name)).name
    if not name or not path.is_file() or path.stat().st_size > _DOCUMENT_BYTES_MAX:
        return []
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def written_with(path: Path) -> list[str]:
    """Return the packages that a pickle needs, in the versions that wrote it; none: it fits those of the server."""
    release, named, numpy_2 = "", set[bytes](), False
    for content in _pieces(path):
        found = _RELEASE.search(content)
        release = release or (found[1].decode() if found else "")
        named |= {module for module in _PACKAGES if module in content}
        numpy_2 |= b"numpy._core" in content
    if not release or release == _installed(_SCIKIT):
        return []
    others = [f"{package}=={here}" if (here := _installed(package)) else package for package in _names(named)]
    return [f"{_SCIKIT}=={release}", "numpy>=2" if numpy_2 else "numpy<2", *others]


def _names(modules: set[bytes]) -> list[str]:
    return sorted(_PACKAGES[module] for module in modules)


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield the content of a file, which may be compressed, in pieces that overlap; ends early where it is damaged."""
    last, left = b"", _READ_BYTES_MAX
    with path.open("rb") as file:
        head = file.read(6)
        file.seek(0)
        decompress = next((start() for magic, start in _COMPRESSIONS if head.startswith(magic)), None)
        while left > 0 and (chunk := file.read(_READ_BYTES)):
            try:
                for piece in [chunk] if decompress is None else decompress(chunk):
                    yield last + piece
                    last, left = piece[-_OVERLAP_BYTES:], left - len(piece)
                    if left <= 0:
                        return
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
                return


def _zlib() -> Callable[[bytes], Iterator[bytes]]:
    one = zlib.decompressobj(zlib.MAX_WBITS | 32)  # with a header of zlib or gzip

    def decompress(chunk: bytes) -> Iterator[bytes]:
        while chunk:
            yield one.decompress(chunk, _READ_BYTES)
            chunk = one.unconsumed_tail

    return decompress


def _other(start: Callable[[], Any]) -> Callable[[], Callable[[bytes], Iterator[bytes]]]:
    def begin() -> Callable[[bytes], Iterator[bytes]]:
        one = start()

        def decompress(chunk: bytes) -> Iterator[bytes]:
            yield one.decompress(chunk, _READ_BYTES)
            while not (one.eof or one.needs_input):
                yield one.decompress(b"", _READ_BYTES)

        return decompress

    return begin


_COMPRESSIONS: tuple[tuple[bytes | tuple[bytes, ...], Callable[[], Callable[[bytes], Iterator[bytes]]]], ...] = (
    ((b"\x1f\x8b", b"\x78"), _zlib),
    (b"BZh", _other(bz2.BZ2Decompressor)),
    ((b"\xfd7zXZ", b"]\0\0"), _other(lzma.LZMADecompressor)),
)
