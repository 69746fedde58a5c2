"""The gate on accuracy: outputs of a candidate against those of the baseline, on samples it was not calibrated with.

expected, actual (by output) ─> figures of each output ─> within the gate's limits? ─> Judgement
Pure. A cosine is blind to the length of a vector, so the lengths may differ by no more than the distance that the
cosine allows between vectors of one length: sqrt(2 (1 - cosine_min)), 4.5 % by default.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from millstream.plugins.compile.candidate import Bounds
from millstream.plugins.compile.race.report import Gate, OutputFigures
from millstream.services.model.agreement import Array, as_float, disagreeing_rows
from millstream.services.model.datatypes import FLOATS
from millstream.services.model.signature import Signature, TensorSpec

#: Rows with fewer elements have no cosine of their own (that of single numbers is a sign): all rows make one vector.
ROW_ELEMENTS_MIN = 8
#: Elements whose expected values differ by less than this share of the row's range are tied: either may be the largest.
TIED = 1e-3
#: Factor of the neighbours in the trial for influence between rows: far from the samples, and finite.
NEIGHBOURS = 16.0
#: Numbers below the least normal one may become zero: some libraries compute without them.
NORMAL_MIN = {"FP32": float(np.finfo(np.float32).tiny), "BF16": float(np.finfo(np.float32).tiny)}
#: Largest distance, relative to the length of a row, of a form whose answers differ by rounding alone.
ROUNDING = 0.01
#: A row of a lossy form may be so many times as far off as the gate allows where it was not judged with such rows.
SLACK = 2.0


class Judgement(NamedTuple):
    """What the gate says of a candidate; `why` is empty if it passes. `bounds`: of inputs that it may get then."""

    outputs: dict[str, OutputFigures]
    why: str
    bounds: Bounds = {}  # noqa: RUF012 - no instance changes it

    @property
    def cosine_min(self) -> float | None:
        """The least cosine of all outputs; None: no output has one."""
        return min((one.cosine for one in self.outputs.values() if one.cosine is not None), default=None)

    @property
    def agreement_min(self) -> float | None:
        """The least agreement of all outputs; None: no output has one."""
        return min((one.agreement for one in self.outputs.values() if one.agreement is not None), default=None)


def judge(
    signature: Signature,
    expected: Sequence[Array],
    actual: Sequence[Array],
    gate: Gate,
    embeddings: Collection[str] = (),
) -> Judgement:
    """Compare all outputs of the same inputs. The first axis of each array is the rows, if the version batches.

    Args:
        signature: of the version.
        expected: outputs of the baseline, in the signature's order.
        actual: outputs of the candidate.
        gate: the limits.
        embeddings: outputs whose largest element says nothing.
    """
    if len(actual) != len(signature.outputs):
        return Judgement({}, f"it has {len(actual)} outputs instead of {len(signature.outputs)}")
    outputs: dict[str, OutputFigures] = {}
    for spec, one, other in zip(signature.outputs, expected, actual, strict=True):
        figures = _figures(spec, one, other, batching=signature.batching)
        if spec.name in embeddings:
            figures = figures.model_copy(update={"agreement": None})
        outputs[spec.name] = figures.model_copy(update={"why": figures.why or _refusal(spec, figures, gate)})
    refused = [f"output {name!r}: {figures.why}" for name, figures in outputs.items() if figures.why]
    return Judgement(outputs, "; ".join(refused[:3]))


def differing(
    signature: Signature, expected: Sequence[Array], actual: Sequence[Array], gate: Gate, *, lossy: bool
) -> str:
    """Return how a row differs from the baseline's, of inputs that the gate has no sample of; empty: none does.

    NaN and infinity stay what they are, integers, booleans and text are equal. No row hides behind the others.
    """
    farthest = SLACK * _farthest(gate) if lossy else ROUNDING
    for spec, one, other in zip(signature.outputs, expected, actual, strict=True):
        figures = _figures(spec, one, other, batching=signature.batching)
        why = figures.why
        if spec.datatype not in FLOATS:
            why = why or ("" if figures.equal == 1.0 else "other values")
        elif figures.distance is not None and not figures.distance <= farthest:
            why = why or f"a row is {figures.distance:.1%} of its length away"
        if why:
            return f"output {spec.name!r}: {why}"
    return ""


def _farthest(gate: Gate) -> float:
    """Return the distance, relative to their length, that the cosine allows between vectors of one length."""
    return math.sqrt(2 * (1 - gate.cosine_min))


def influenced(signature: Signature, once: Sequence[Array], again: Sequence[Array]) -> str:
    """Return the output whose first row differs between two runs in which only the other rows differ; empty: none.

    Args:
        signature: of the version.
        once: outputs of a run.
        again: outputs of a run with the same first row, the same shapes and other neighbours.
    """
    for spec, one, other in zip(signature.outputs, once, again, strict=True):
        if one.shape[1:] != other.shape[1:] or disagreeing_rows(spec.datatype, other[:1], one[:1]):
            return spec.name
    return ""


def neighbours(inputs: Mapping[str, Array], datatypes: Mapping[str, str]) -> dict[str, Array]:
    """Return inputs with the same first row and other neighbours: floats of another magnitude, the rest in reverse."""
    changed: dict[str, Array] = {}
    for name, array in inputs.items():
        others = array[:0:-1]
        if datatypes[name] in FLOATS - {"BF16"}:
            with np.errstate(over="ignore"):
                others = (others * NEIGHBOURS).astype(array.dtype)
        changed[name] = np.concatenate([array[:1], others])
    return changed


def _figures(spec: TensorSpec, expected: Array, actual: Array, *, batching: bool) -> OutputFigures:
    if expected.shape != actual.shape:
        return OutputFigures(why=f"the shape is {list(actual.shape)} instead of {list(expected.shape)}")
    if expected.dtype != actual.dtype:
        return OutputFigures(why=f"the datatype is {actual.dtype} instead of {expected.dtype}")
    if not expected.size:
        return OutputFigures(equal=1.0)
    if spec.datatype not in FLOATS:
        return OutputFigures(equal=float(np.mean(np.asarray(expected == actual, dtype=bool))))
    left, right = as_float(spec.datatype, expected), as_float(spec.datatype, actual)
    finite = np.isfinite(left)
    # Not both infinite with the same sign, and not both NaN.
    odd = ~finite | ~np.isfinite(right)
    if np.any(odd & (left != right) & ~(np.isnan(left) & np.isnan(right))):
        return OutputFigures(why="NaN or infinity in other places than expected")
    least = NORMAL_MIN.get(spec.datatype, 0.0)
    left, right = (np.where(finite & (np.abs(one) >= least), one, 0.0) for one in (left, right))
    rows = len(left) if batching and left.ndim else 1
    cosine, length = _cosine(left.reshape(rows, -1), right.reshape(rows, -1))
    difference = np.abs(left - right)
    return OutputFigures(
        cosine=cosine,
        agreement=_agreement(left, right, batching=batching),
        distance=length,
        max_abs=float(difference.max()),
        equal=float(np.mean(difference == 0)),
    )


def _cosine(expected: Array, actual: Array) -> tuple[float, float]:
    """Return the least cosine and the largest relative distance of rows.

    Short rows have one cosine together. Their distance is relative to their own length or, where that is smaller, to
    the median of all: a difference of two numbers near zero says nothing. Where the expected vector is zero, an actual
    zero counts as equal and anything else as opposite.
    """
    if 0 < expected.shape[1] < ROW_ELEMENTS_MIN and len(expected) > 1:
        lengths = np.linalg.norm(expected, axis=1)
        away = np.linalg.norm(expected - actual, axis=1) / np.maximum(lengths, np.median(lengths) or 1.0)
        together = _cosine(expected.reshape(1, -1), actual.reshape(1, -1))
        return together[0], max(together[1], float(away.max()))
    # Scaled first: squares of large numbers overflow.
    scale = np.maximum(np.abs(expected).max(axis=1), np.abs(actual).max(axis=1))[:, None]
    scale[scale == 0] = 1.0
    expected, actual = expected / scale, actual / scale
    one, other = np.linalg.norm(expected, axis=1), np.linalg.norm(actual, axis=1)
    nothing = one == 0
    product = np.where(nothing | (other == 0), 1.0, one * other)
    cosines = np.sum(expected * actual, axis=1) / product
    cosines[nothing & (other == 0)] = 1.0
    distances = np.linalg.norm(expected - actual, axis=1) / np.where(nothing, 1.0, one)
    return float(np.clip(cosines, -1.0, 1.0).min()), float(distances.max())


def _agreement(expected: Array, actual: Array, *, batching: bool) -> float | None:
    """Return the share of places where the largest element along the last axis is the same, or tied with it.

    None for an output without such an axis: one number for each row.
    """
    if expected.ndim < (2 if batching else 1) or expected.shape[-1] < 2:
        return None
    expected, actual = (array.reshape(-1, array.shape[-1]) for array in (expected, actual))
    chosen = np.take_along_axis(expected, actual.argmax(axis=1)[:, None], axis=1)[:, 0]
    largest, least = expected.max(axis=1), expected.min(axis=1)
    return float(np.mean(chosen >= largest - TIED * (largest - least)))


def _refusal(spec: TensorSpec, figures: OutputFigures, gate: Gate) -> str:
    """Return why the gate refuses an output; empty: it passes."""
    if spec.datatype not in FLOATS:
        return "" if figures.equal == 1.0 else f"only {figures.equal or 0:.2%} of the elements are equal"
    if figures.cosine is None:  # it is empty
        return ""
    if figures.cosine < gate.cosine_min:
        return f"the cosine is {figures.cosine:.5f}, less than {gate.cosine_min:g}"
    if figures.agreement is not None and figures.agreement < gate.agreement_min:
        return f"the largest element is another in {1 - figures.agreement:.1%} of the places"
    if figures.distance is not None and figures.distance > SLACK * _farthest(gate):
        return f"it is {figures.distance:.1%} of its length away, though its direction is right"
    return ""
