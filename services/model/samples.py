"""Inputs with which compiled forms are calibrated and judged. The one place that reads and checks their files.

.npz file: `input/<name>`, or just `<name>`, and `output/<name>` ─> names, datatypes, shapes, rows ─> arrays by name
The first dimension of each is the rows; a version that does not batch has the arrays of one call. Text has the numpy
datatype S or U, BF16 its bits. Anybody may have written a file: it is bounded before it is unpacked, and no pickle is
read. It is a zip archive of .npy files, and each layer has errors of its own, from zlib's to those of Python's grammar.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from millstream.services.errors import Failure, invalid
from millstream.services.model.datatypes import BYTES, NUMPY
from millstream.services.model.signature import Signature, TensorSpec, needed_inputs
from millstream.services.nearest_names import unknown_key

SAMPLES_BYTES_MAX = 256 << 20  # of all arrays of a file, unpacked; a larger one is refused unread
ARRAYS_MAX = 1024
ROWS_MAX = 65_536
INPUT, OUTPUT = "input/", "output/"

Array = np.ndarray[Any, Any]


class NpzError(ValueError):
    """The file is no .npz file of arrays; says why."""


class TooLargeError(ValueError):
    """Its arrays are too many, or too large together; says by how much."""


def read_npz(
    file: Path | IO[bytes], bytes_max: int, arrays_max: int, wanted: Callable[[str], bool] = lambda _: True
) -> dict[str, Array]:
    """Return the arrays of a file by name.

    Args:
        file: a path, or a file that can be read from its beginning again.
        bytes_max: of all arrays, unpacked.
        arrays_max: how many.
        wanted: whether an array is read, by its name.

    Raises NpzError, TooLargeError, and OSError if the file itself cannot be read.
    """
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return read_npz(opened, bytes_max, arrays_max, wanted)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        if len(entries) > arrays_max:
            raise TooLargeError(f"{len(entries)} arrays, more than {arrays_max}")
        if sum(entry.file_size for entry in entries) > bytes_max:
            raise TooLargeError(f"the arrays take more than {bytes_max >> 20} MiB")
        file.seek(0)
        with np.load(file, allow_pickle=False) as loaded:
            arrays = {name: loaded[name] for name in loaded.files if wanted(name)}
    except TooLargeError:
        raise
    except Exception as error:
        raise NpzError((str(error) or type(error).__name__)[:200]) from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy returns the bytes of an entry that is no .npy file
            raise NpzError(f"{name[:100]!r} is no array")
    return arrays


class Samples(NamedTuple):
    """Arrays as a run takes and returns them: text as bytes objects.

    Args:
        inputs: name of an input -> its rows.
        outputs: name of an output -> its rows, where they are known.
    """

    inputs: dict[str, Array]
    outputs: dict[str, Array]


def read_samples(file: Path | IO[bytes], signature: Signature) -> Samples:
    """Return the samples in a file, of which no pickle is read. Raises Failure(INVALID) with what to change."""
    return _checked(_read(file, signature), signature)


def read_inputs(file: Path | IO[bytes], signature: Signature) -> dict[str, Array]:
    """Return the inputs in a file, as `read_samples` does; its outputs are neither read nor checked."""
    found = _read(file, signature, outputs=False)
    return _checked(found, signature).inputs


def stored(samples: Samples) -> dict[str, Array]:
    """Return the arrays of a file that `read_samples` reads."""
    inputs = {INPUT + name: as_stored(array) for name, array in samples.inputs.items()}
    return inputs | {OUTPUT + name: as_stored(array) for name, array in samples.outputs.items()}


def as_stored(array: Array) -> Array:
    """Return text with a numpy datatype that a file holds without pickle; other arrays as they are."""
    return array.astype("S") if array.dtype == object else array


def _read(file: Path | IO[bytes], signature: Signature, *, outputs: bool = True) -> dict[str, Array]:
    """Return the arrays of a file by their full names. Raises Failure(INVALID)."""
    known = {INPUT + spec.name for spec in signature.inputs} | {OUTPUT + spec.name for spec in signature.outputs}

    def full(name: str) -> str:
        return name if name in known or name.startswith(INPUT) else INPUT + name

    def wanted(name: str) -> bool:
        return outputs or not name.startswith(OUTPUT) or INPUT + name in known

    try:
        found = read_npz(file, SAMPLES_BYTES_MAX, ARRAYS_MAX, wanted)
    except TooLargeError as error:
        raise invalid(f"samples: {error}: send fewer rows") from error
    except (OSError, NpzError) as error:
        hint = "; text arrays need the datatype S or U" if "pickle" in str(error) else ""
        raise invalid(
            f"samples: this is not an .npz file of numpy arrays ({str(error)[:200]}){hint}: "
            f"numpy.savez('samples.npz', **{{'{signature.inputs[0].name}': rows}}) writes one"
        ) from error
    return {full(name): array for name, array in found.items()}


def _checked(arrays: Mapping[str, Array], signature: Signature) -> Samples:
    inputs = {INPUT + spec.name: spec for spec in signature.inputs}
    outputs = {OUTPUT + spec.name: spec for spec in signature.outputs}
    specs = outputs | inputs
    for name in arrays:
        if name not in specs:
            known = [*(spec.name for spec in signature.inputs), *outputs]
            raise invalid(f"samples: {unknown_key(name.removeprefix(INPUT), known, 'array')}")
    for spec in needed_inputs(signature):
        if INPUT + spec.name not in arrays:
            raise invalid(
                f"samples: the input '{spec.name}' is missing ({spec.datatype} {list(spec.shape)}): "
                f"numpy.savez(file, **{{'{spec.name}': rows, …}})"
            )
    found = {name: _converted(specs[name].name, array, specs[name]) for name, array in arrays.items()}
    if signature.batching:
        _check_rows(found)
    return Samples(
        {inputs[name].name: array for name, array in found.items() if name in inputs},
        {outputs[name].name: array for name, array in found.items() if name not in inputs},
    )


def _check_rows(arrays: Mapping[str, Array]) -> None:
    rows = {name: len(array) for name, array in arrays.items()}
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"'{name}' {count}" for name, count in rows.items())
        raise invalid(f"samples: all arrays must have the same number of rows, not {counts}")
    count = next(iter(rows.values()), 0)
    if not count:
        raise invalid("samples: there are no rows")
    if count > ROWS_MAX:
        raise invalid(f"samples: {count} rows are more than {ROWS_MAX}: send fewer")


def _converted(name: str, array: Array, spec: TensorSpec) -> Array:
    """Return an array with the datatype of its tensor. Raises Failure(INVALID) if that would change its kind."""
    if len(array.shape) != len(spec.shape) or any(
        dim not in {-1, size} for dim, size in zip(spec.shape, array.shape, strict=True)
    ):
        raise invalid(f"samples: '{name}' has the shape {list(array.shape)} instead of {list(spec.shape)} (-1: any)")
    if spec.datatype == BYTES:
        return _text(name, array)
    expected = NUMPY[spec.datatype]
    if not np.can_cast(array.dtype, expected, "same_kind"):
        raise _other_datatype(name, array, spec.datatype, f"{name}.astype('{expected.name}')")
    with np.errstate(over="ignore"):
        found = np.asarray(array, dtype=expected, order="C")  # `ascontiguousarray` gives scalars a dimension
    if array.dtype != expected and not _is_kept(array, found):
        raise invalid(
            f"samples: '{name}' has numbers that {expected} cannot hold, the largest {np.nanmax(np.abs(array)):g}"
        )
    return found


def _is_kept(before: Array, after: Array) -> bool:
    """Return whether a conversion made no number infinite, or another integer."""
    if after.dtype.kind == "f":
        return not bool((np.isfinite(before) & ~np.isfinite(after)).any())
    return bool(np.array_equal(before, after))


def _text(name: str, array: Array) -> Array:
    if array.dtype.kind not in "SUO":
        raise _other_datatype(name, array, BYTES, "an array of str or bytes")
    elements = [one.encode() if isinstance(one, str) else bytes(one) for one in array.ravel().tolist()]
    text = np.empty(len(elements), dtype=object)
    text[:] = elements
    return text.reshape(array.shape)


def _other_datatype(name: str, array: Array, wanted: str, change: str) -> Failure:
    return invalid(f"samples: '{name}' has the datatype {array.dtype} instead of {wanted}: {change}")
