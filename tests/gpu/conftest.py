"""Leaves out what needs a GPU where there is none."""

from __future__ import annotations

import onnxruntime
import pytest

from millstream.services.errors import Failure
from millstream.workers.backends.gpu import describe_gpu


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime-gpu is not installed")
    try:
        describe_gpu("cuda:0", 0)
    except Failure as failure:
        pytest.skip(failure.message)
