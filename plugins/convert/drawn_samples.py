"""Samples of models whose files say what they take: drawn inputs of several rows, and what the framework answers.

names, datatypes, dimensions ─> a size and a style of values that the framework takes ─> rows ─> its answers
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from millstream.services.errors import Failure, invalid
from millstream.services.ingest.importers import Array, Sample
from millstream.services.model.datatypes import BYTES, NUMPY

#: rows, and how variable dimensions differ from a size with which the model runs: their number, and their share
_SHAPES = ((3, 0, 0.0), (1, 0, 0.0), (4, 3, 0.0), (2, 0, 0.5))
#: no further sample is run after this time
_SECONDS_MAX = 10.0
_CAUSE_CHARACTERS_MAX = 300
#: numpy's name of a type -> v2 datatype
_DATATYPES = {dtype.name: name for name, dtype in NUMPY.items() if name != "BF16"} | {"str": BYTES}

#: the inputs in their order -> the outputs by name
Answer = Callable[[Sequence[Array]], Mapping[str, Array]]


class ModelInput(NamedTuple):
    """An input to draw. `dims`: None or a name for a variable size."""

    name: str
    datatype: str
    dims: Sequence[int | str | None]


def model_input(name: str, dtype: str, dims: Sequence[int | None]) -> ModelInput:
    """Return an input by numpy's name of its type; "str" is text. Raises Failure(INVALID) if none can be drawn."""
    if dtype not in _DATATYPES:
        raise invalid(f"input {name[:80]!r} is {dtype}, of which no samples can be drawn: save it with another one")
    return ModelInput(name, _DATATYPES[dtype], dims)


def draw_samples(
    inputs: Sequence[ModelInput], answer: Answer, what: str = "generated inputs", *, wide: bool = False
) -> list[Sample]:
    """Return what a model answers to drawn inputs, the first sample of several rows if it takes them.

    Args:
        inputs: to draw.
        answer: what runs the model; may raise anything.
        what: the inputs, for the message.
        wide: draw values of large magnitude, too.

    Raises Failure(INVALID) with the first error if it takes none.
    """
    from millstream.services.ingest.model_io import ModelTensor
    from millstream.services.ingest.trial_inputs import Style, draw, find_probe
    from millstream.services.ingest.trial_session import TrialError

    class Asked:
        def run(self, arrays: Sequence[Array]) -> list[Array]:
            try:
                return list(answer(arrays).values())
            except (Failure, MemoryError):
                raise
            except Exception as error:  # of any library: a size or value that it does not take
                lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
                raise TrialError(lines[-1][:_CAUSE_CHARACTERS_MAX]) from error

    tensors = [ModelTensor(one.name, one.datatype, tuple(one.dims)) for one in inputs]
    try:
        probe = find_probe(Asked(), tensors)
    except TrialError as error:
        raise invalid(f"the model does not run on {what}: {error}") from error
    samples: list[Sample] = []
    start = time.monotonic()
    styles = (probe.style, Style.WIDE) if wide else (probe.style,)
    for (rows, more, share), style in product(_SHAPES, styles):
        if samples and time.monotonic() - start > _SECONDS_MAX:
            break
        size = probe.size + more + int(share * probe.size)
        arrays = draw(tensors, rows, size, style, keep_fixed=True)
        try:
            answers = answer(arrays)
        except (Failure, MemoryError):
            raise
        except Exception:  # noqa: S112 - a fixed number of rows, a size or a value that the model refuses
            continue
        samples.append(_sample(inputs, arrays, answers))
    if not samples:  # it takes one row and the size of the probe alone
        arrays = draw(tensors, 1, probe.size, probe.style)
        samples.append(_sample(inputs, arrays, answer(arrays)))
    return samples


def _sample(inputs: Sequence[ModelInput], arrays: Sequence[Array], answers: Mapping[str, Array]) -> Sample:
    given = {one.name: array for one, array in zip(inputs, arrays, strict=True)}
    return Sample(given, {name: np.array(array) for name, array in answers.items()})
