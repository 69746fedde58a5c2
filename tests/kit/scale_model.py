"""Requests to a model that doubles its input (tests.kit.models.scale), in all forms of tensors, and their check."""

from __future__ import annotations

import numpy as np

from tests.kit import v2
from tests.kit.load import Load

X = np.array([[1, 2], [3, 4]], np.float32)
BODIES = [
    v2.request({"x": X * i}, binary=bool(i % 2), binary_outputs=bool(i % 2), parameters=v2.PATIENT) for i in range(1, 9)
]


def check_answers(load: Load) -> None:
    """Assert that every answer is a 200 with the caller's own rows, doubled."""
    for answer in load.answers:
        assert answer.status == 200, answer.body
        got = v2.outputs(answer.body, answer.headers)["y"].astype(np.float32)
        np.testing.assert_array_equal(got, X * (answer.sent + 1) * np.float32(2))
    print(f"{len(load.answers)} requests, all answered right")
