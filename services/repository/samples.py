"""Samples: inputs with which a race calibrates and compares. They may be users' data: mode 0600, gone with the version.

<root>/models/<model>/<version>/race/uploaded.npz  given by a caller of the API; kept for later races of the version
<root>/models/<model>/<version>/race/captured.npz  rows of live requests, if the endpoint allows it; gone after a race

Arrays are called `input/<name>` and, where outputs are known, `output/<name>`; their first dimension is rows.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import NUMPY
from millstream.services.model.manifest import Manifest
from millstream.services.model.npz import NpzError, TooLargeError, read_npz
from millstream.services.model.signature import TensorSpec
from millstream.services.nearest_names import unknown_key
from millstream.services.repository.disk import fsync, storage_errors

ARRAYS_BYTES_MAX = 256 << 20  # of all arrays, unpacked
ARRAYS_MAX = 256
ROWS_MAX = 65_536
UNFINISHED_S = 3600.0  # after which the file of a write that did not end is deleted
_NEW = ".new-"
_INPUT, _OUTPUT = "input/", "output/"

Array = np.ndarray[Any, Any]


class FoundSamples(NamedTuple):
    """Samples of a version.

    Args:
        captured: from live traffic; False: uploaded.
    """

    path: Path
    captured: bool


class Samples:
    """The samples of a repository's versions. Safe for several threads and processes.

    Args:
        models: the repository's folder of models.
    """

    def __init__(self, models: Path) -> None:
        self._models = models

    def find(self, manifest: Manifest) -> FoundSamples | None:
        """Return the uploaded samples, else the captured ones, if there are any."""
        for name in ("uploaded", "captured"):
            path = self._folder(manifest) / f"{name}.npz"
            if path.is_file():
                return FoundSamples(path, name == "captured")
        return None

    def write(self, manifest: Manifest, arrays: Mapping[str, Array], *, captured: bool = False) -> Path:
        """Store samples in place of earlier ones. Raises Failure(NOT_FOUND, STORAGE, INTERNAL)."""
        folder = self._folder(manifest)
        if not folder.parent.is_dir():
            raise Failure(Code.NOT_FOUND, f"version {manifest.version} of {manifest.model!r} was deleted")
        path = folder / ("captured.npz" if captured else "uploaded.npz")
        with storage_errors(self._models):
            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=_NEW)  # mode 0600
            try:
                with os.fdopen(descriptor, "wb") as file:
                    np.savez(file, **arrays)  # type: ignore[arg-type]
                    file.flush()
                    os.fsync(file.fileno())
                Path(temporary).replace(path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
            fsync(folder)
        return path

    def forget_captured(self, manifest: Manifest, *, older_s: float = 0.0) -> None:
        """Delete samples of live traffic, if they are old enough: a race has used them, or none came."""
        path = self._folder(manifest) / "captured.npz"
        with suppress(OSError):
            if not older_s or time.time() - path.stat().st_mtime > older_s:  # noqa: TID251 - as the file system's clock
                path.unlink(missing_ok=True)

    def sweep(self, asked: Callable[[str], bool], older_s: float) -> None:
        """Delete old and unwanted samples of live traffic, of all versions, and what killed processes left of files.

        Args:
            asked: whether a model's endpoint asks for samples; those of others are deleted.
            older_s: others are deleted at this age.
        """
        now = time.time()  # noqa: TID251 - as the file system's clock
        for path in self._models.glob("*/*/race/*"):
            captured = path.name == "captured.npz"
            if not captured and not path.name.startswith(_NEW):
                continue
            with suppress(OSError):
                age_s = now - path.stat().st_mtime
                if age_s > (older_s if captured else UNFINISHED_S) or (captured and not asked(path.parts[-4])):
                    path.unlink(missing_ok=True)

    def _folder(self, manifest: Manifest) -> Path:
        return self._models / manifest.model / str(manifest.version) / "race"


def read_samples(manifest: Manifest, file: IO[bytes]) -> dict[str, Array]:
    """Return the arrays of an .npz file as races want them. Raises Failure(INVALID) with what to change.

    Plain names of inputs are accepted for `input/<name>`. No pickle is read.
    """
    try:
        arrays = read_npz(file, ARRAYS_BYTES_MAX, ARRAYS_MAX)
    except TooLargeError as error:
        raise invalid(
            f"samples: at most {ARRAYS_MAX} arrays of {ARRAYS_BYTES_MAX >> 20} MiB together: send fewer rows"
        ) from error
    except (OSError, NpzError) as error:
        raise invalid(
            f"samples are no .npz file without pickles: {str(error)[:200]}; write one with "
            f"numpy.savez('samples.npz', **{{'{_INPUT}{manifest.signature.inputs[0].name}': rows}})"
        ) from error
    return _checked(manifest, arrays)


def _checked(manifest: Manifest, arrays: Mapping[str, Array]) -> dict[str, Array]:
    signature = manifest.signature
    inputs = {_INPUT + spec.name: spec for spec in signature.inputs}
    outputs = {_OUTPUT + spec.name: spec for spec in signature.outputs}
    named = {name if name in inputs or name in outputs else _INPUT + name: array for name, array in arrays.items()}
    for name in named:
        if name not in inputs and name not in outputs:
            raise invalid(f"samples: {unknown_key(name.removeprefix(_INPUT), [*inputs, *outputs], 'array')}")
    for name, spec in inputs.items():
        if name not in named and not spec.optional:
            raise invalid(f"samples: there is no array '{name}' ({spec.datatype} {list(spec.shape)})")
    checked = {name: _as(name, (inputs | outputs)[name], array) for name, array in named.items()}
    rows = {len(array) for array in checked.values()} if signature.batching else {1}
    if len(rows) > 1 or not 1 <= max(rows) <= ROWS_MAX:
        counts = ", ".join(f"'{name}' {len(array)}" for name, array in checked.items())
        raise invalid(f"samples: all arrays have the same number of rows, 1 to {ROWS_MAX}: {counts}")
    return checked


def _as(name: str, spec: TensorSpec, array: Array) -> Array:
    """Return an array with the datatype of its tensor. Raises Failure(INVALID)."""
    dims = list(array.shape)
    fits = len(dims) == len(spec.shape) and all(want in {-1, have} for want, have in zip(spec.shape, dims, strict=True))
    if not fits:
        raise invalid(f"samples: '{name}' has the shape {dims}, and {list(spec.shape)} is wanted (-1: any)")
    if spec.datatype == "BYTES":
        if array.dtype.kind not in "SU":
            raise invalid(f"samples: '{name}' is text: an array of str or bytes, not of {array.dtype}")
        return array
    wanted = np.dtype(NUMPY[spec.datatype])
    if not np.can_cast(array.dtype, wanted, "same_kind"):
        raise invalid(f"samples: '{name}' has the type {array.dtype}, and {wanted} is wanted")
    with np.errstate(over="ignore"):
        found = array.astype(wanted, copy=False)
    if found.dtype.kind == "f" and bool((np.isfinite(array) & ~np.isfinite(found)).any()):
        raise invalid(
            f"samples: '{name}' has numbers that {wanted} cannot hold, the largest {np.nanmax(np.abs(array)):g}"
        )
    return found
