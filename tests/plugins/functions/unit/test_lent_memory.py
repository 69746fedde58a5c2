"""children/worker: answers are views of shared memory, and no later answer is written where one is still in use."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from millstream.plugins.children.worker import LENT_ANSWERS_MAX
from millstream.plugins.functions.worker import Python
from millstream.workers.backends.base import Array
from tests.contract.backend_cases import same
from tests.kit import functions

ROWS = 100_000


def answer(of: int, instance: object) -> Array:
    (found,) = instance.run({"x": np.full((ROWS, 2), of, np.float32)})  # type: ignore[attr-defined]
    return found  # type: ignore[no-any-return]


def test_answers_in_use_are_not_written_over(tmp_path: Path) -> None:
    instance = Python(tmp_path).load(functions.identity(tmp_path, "FP32"), same(), "cpu", 1)
    kept = [answer(number, instance) for number in range(3 * LENT_ANSWERS_MAX)]
    parts = [array[1:2] for array in kept[:2]]
    assert [array[ROWS - 1, 1] for array in kept] == list(range(3 * LENT_ANSWERS_MAX))
    del kept
    for number in range(20):
        assert answer(number, instance)[0, 0] == number
        assert [part[0, 0] for part in parts] == [0, 1], "also a view of an answer keeps it"
    instance.close()
    assert parts[0][0, 0] == 0, "and outlives the instance"
