"""The inputs of a race: read from an .npz and checked against the signature, or drawn from the signature.

Arrays are called `input/<name>`, or just `<name>`; `output/<name>` are ignored here. The first dimension of each is the
rows; a version that does not batch has the arrays of one call. Text has the numpy datatype S or U, BF16 its bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from millstream.services.errors import invalid
from millstream.services.model.agreement import Array
from millstream.services.model.datatypes import BYTES, FLOATS, NUMPY
from millstream.services.model.npz import NpzError, TooLargeError, read_npz
from millstream.services.model.signature import Signature, TensorSpec, needed_inputs

SAMPLES_BYTES_MAX = 1 << 28  # of all arrays; a larger file is refused
ARRAYS_MAX = 1024
INPUT, OUTPUT = "input/", "output/"
#: Upper bounds of random integers, tried from the largest: a token id beyond the model's embedding fails its run, and
#: no signature gives the size of the embedding.
INTEGERS_MAX = (30_000, 1000, 100, 10, 2, 1)
RANDOM_ROWS = 64
_ONES = ("mask",)
_ZEROS = ("token_type", "segment")


class Split(NamedTuple):
    """Samples for calibration, and others by which candidates are judged.

    Args:
        calibration: input -> array.
        judged: calls; of a version that batches one, with all its rows.
        disjoint: no sample is in both.
    """

    calibration: dict[str, Array]
    judged: tuple[dict[str, Array], ...]
    disjoint: bool


def read_samples(path: Path, signature: Signature) -> dict[str, Array]:
    """Return the inputs in a file. Raises Failure(INVALID) with what to change."""
    inputs = {spec.name for spec in signature.inputs}
    try:
        arrays = read_npz(
            path, SAMPLES_BYTES_MAX, ARRAYS_MAX, lambda name: not name.startswith(OUTPUT) or name in inputs
        )
    except TooLargeError as error:
        raise invalid(f"samples: {error}: send fewer rows") from error
    except (OSError, NpzError) as error:
        hint = "; text arrays need the datatype S or U" if "pickle" in str(error) else ""
        raise invalid(f"samples: this is not an .npz file of numpy arrays ({str(error)[:200]}){hint}") from error
    found = {name.removeprefix(INPUT): array for name, array in arrays.items()}
    return check_samples(found, signature)


def check_samples(arrays: Mapping[str, Array], signature: Signature) -> dict[str, Array]:
    """Return the arrays as a run takes them. Raises Failure(INVALID) for names, datatypes or shapes that do not fit."""
    specs = {spec.name: spec for spec in signature.inputs}
    for name in arrays:
        if name not in specs:
            raise invalid(f"samples: {name!r} is no input of the model; its inputs: {', '.join(specs)}")
    for spec in needed_inputs(signature):
        if spec.name not in arrays:
            raise invalid(f"samples: the input {spec.name!r} is missing: np.savez(file, **{{{spec.name!r}: array, …}})")
    checked = {name: _checked(array, specs[name]) for name, array in arrays.items()}
    if signature.batching:
        rows = {name: len(array) for name, array in checked.items()}
        if len(set(rows.values())) > 1:
            raise invalid(f"samples: all inputs must have the same number of rows, not {rows}")
        if not next(iter(rows.values()), 0):
            raise invalid("samples: there are no rows")
    return checked


def _checked(array: Array, spec: TensorSpec) -> Array:
    if len(array.shape) != len(spec.shape) or any(
        dim not in {-1, size} for dim, size in zip(spec.shape, array.shape, strict=True)
    ):
        raise invalid(f"samples: {spec.name!r} has the shape {list(array.shape)} instead of {list(spec.shape)}")
    if spec.datatype == BYTES:
        if array.dtype.kind not in "SUO":
            raise invalid(f"samples: {spec.name!r} is text and has the datatype {array.dtype} instead of S or U")
        elements = [one.encode() if isinstance(one, str) else bytes(one) for one in array.ravel().tolist()]
        text = np.empty(len(elements), dtype=object)
        text[:] = elements
        return text.reshape(array.shape)
    expected = NUMPY[spec.datatype]
    if array.dtype.newbyteorder("=") != expected.newbyteorder("="):
        raise invalid(
            f"samples: {spec.name!r} has the datatype {array.dtype} instead of {spec.datatype}: "
            f"{spec.name}.astype('{expected.name}')"
        )
    return np.asarray(array, dtype=expected, order="C")  # `ascontiguousarray` gives scalars a dimension


def write_samples(path: Path, inputs: Mapping[str, Array]) -> None:
    """Write inputs as `read_samples` reads them. Raises OSError."""
    arrays = {INPUT + name: as_stored(array) for name, array in inputs.items()}
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def as_stored(array: Array) -> Array:
    """Return text with a numpy datatype that a file holds without pickle; other arrays as they are."""
    return array.astype("S") if array.dtype == object else array


def rows_of(inputs: Mapping[str, Array], rows: int, first: int = 0) -> dict[str, Array]:
    """Return `rows` rows from the row `first` on; after the last row comes the first one."""
    return {
        name: np.ascontiguousarray(np.take(array, range(first, first + rows), axis=0, mode="wrap"))
        for name, array in inputs.items()
    }


def split(inputs: Mapping[str, Array], signature: Signature, judged_max: int) -> Split:
    """Return the samples for calibration and, apart from them, at most `judged_max` rows that are judged.

    Every second row is judged, so that sorted samples are in both parts. A single sample is in both.
    """
    if not signature.batching:
        return Split(dict(inputs), (dict(inputs),), disjoint=False)
    count = len(next(iter(inputs.values())))
    if count == 1:
        return Split(dict(inputs), (dict(inputs),), disjoint=False)
    judged = {name: np.ascontiguousarray(array[1::2][:judged_max]) for name, array in inputs.items()}
    return Split({name: np.ascontiguousarray(array[::2]) for name, array in inputs.items()}, (judged,), disjoint=True)


def draw(signature: Signature, rows: int, seed: int, size: int, integers_max: int) -> dict[str, Array]:
    """Return random inputs without optional ones, equal for equal arguments.

    Floats are normal; integers are from 0 to `integers_max` - 1; masks are ones, token types zeros.

    Args:
        signature: of the version.
        rows: dimension 0 if the version batches.
        seed: of the numbers.
        size: every other variable dimension.
        integers_max: upper bound of integers.
    """
    random = np.random.default_rng([seed, rows, size])
    drawn: dict[str, Array] = {}
    for spec in needed_inputs(signature):
        shape = [size if dim == -1 else dim for dim in spec.shape]
        if signature.batching:
            shape[0] = rows
        drawn[spec.name] = _drawn(spec, shape, random, integers_max)
    return drawn


def _drawn(spec: TensorSpec, shape: Sequence[int], random: np.random.Generator, integers_max: int) -> Array:
    if spec.datatype == BYTES:
        words = np.array([str(number).encode() for number in range(100)], dtype=object)
        return random.choice(words, shape)
    dtype = NUMPY[spec.datatype]
    if spec.datatype in FLOATS:
        numbers = np.asarray(random.standard_normal(shape, np.float32))
        return (numbers.view(np.uint32) >> 16).astype(np.uint16) if spec.datatype == "BF16" else numbers.astype(dtype)
    name = spec.name.lower()
    if any(word in name for word in _ONES):
        return np.ones(shape, dtype)
    if any(word in name for word in _ZEROS):
        return np.zeros(shape, dtype)
    above = 2 if spec.datatype == "BOOL" else min(integers_max, int(np.iinfo(dtype).max))
    return random.integers(0, above, shape).astype(dtype)
