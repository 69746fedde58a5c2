"""Trial inputs: sizes that are sums of others, extreme rows, and limits on the search."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from millstream.services.ingest.model_io import ModelTensor
from millstream.services.ingest.trial_inputs import Style, draw, extreme_row, find_probe, shape_of
from millstream.services.ingest.trial_session import Session, TrialError, available_bytes, memory_allows
from tests.kit import models


class Fussy:
    """A session that runs only inputs that `accepts` allows, and otherwise fails with each of `reasons` in turn."""

    def __init__(self, reasons: Sequence[str], accepts: int = -1) -> None:
        self.sizes: list[int] = []
        self._reasons, self._accepts = reasons, accepts

    def run(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        size = arrays[0].shape[1]
        self.sizes.append(size)
        if size == self._accepts:
            return [np.zeros((1, 1))]
        raise TrialError(self._reasons[min(len(self.sizes), len(self._reasons)) - 1])


INPUTS = [ModelTensor("x", "FP32", ("N", "L"))]


def test_the_error_is_the_first_one_other_than_out_of_memory() -> None:
    fussy = Fussy(["the window does not fit", "bad_alloc"])
    with pytest.raises(TrialError, match="the window does not fit") as caught:
        find_probe(cast("Session", fussy), INPUTS)
    assert not caught.value.out_of_memory
    with pytest.raises(TrialError) as caught:
        find_probe(cast("Session", Fussy(["bad_alloc"])), INPUTS)
    assert caught.value.out_of_memory


def test_unusual_sizes_are_tried_last() -> None:
    fussy = Fussy(["no"], accepts=1000)
    assert find_probe(cast("Session", fussy), INPUTS).size == 1000
    assert fussy.sizes[0] == 8


def test_a_dimension_that_is_the_sum_of_others_has_their_size() -> None:
    port = ModelTensor("mask", "INT64", ("N", "past + sequence", "sequence", "past_length + 1", None, "a+b+c"))
    assert shape_of(port, 3, 8) == (3, 16, 8, 9, 8, 24)
    assert shape_of(ModelTensor("x", "FP32", ("N", "+".join("a" * 200), "1 + ", "")), 2, 8) == (2, 8, 8, 8)


@pytest.mark.parametrize("datatype", sorted(models.ELEMENT_TYPE))
def test_extreme_rows_are_finite_and_of_the_same_kind(datatype: str) -> None:
    ports = [ModelTensor("x", datatype, ("N", 5))]
    arrays = draw(ports, 4, 8, Style.NORMAL)
    (row,) = extreme_row(ports, arrays)
    assert (row.shape, row.dtype) == ((1, 5), arrays[0].dtype)
    if datatype in {"FP16", "FP32", "FP64"}:
        assert np.isfinite(row.astype(np.float64)).all()
        assert np.abs(row.astype(np.float64)).max() > 50 * np.abs(arrays[0].astype(np.float64)).max()


def test_trials_stay_within_available_memory(tmp_path: Path) -> None:
    assert memory_allows(8, 8)
    assert available_bytes() > 0
    assert available_bytes(tmp_path / "missing") == float("inf")
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:   50 kB\n")
    assert available_bytes(tmp_path / "meminfo") == 50 * 1024
