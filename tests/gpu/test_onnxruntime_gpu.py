"""The ONNX Runtime backend on a GPU: the same numbers as on the CPU, at the speed of a bare loop.

These have not run on hardware yet: docs/backends.md says what has, and when.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Instance
from tests.contract.backend_cases import signature
from tests.kit import models

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TOLERANCE = 1e-3
OF_A_BARE_LOOP = 0.9
ROWS = 64
RUNS = 50


@pytest.fixture(scope="module")
def squeezenet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Signature]:
    path = models.squeezenet(tmp_path_factory.mktemp("gpu") / "squeezenet.onnx")
    output = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).get_outputs()[0]
    shape = tuple(dim if isinstance(dim, int) else -1 for dim in output.shape)
    return path, signature([("data_0", "FP32", (-1, 3, 224, 224))], [(output.name, "FP32", (-1, *shape[1:]))])


def images(rows: int) -> dict[str, np.ndarray]:
    return {"data_0": np.random.default_rng(0).standard_normal((rows, 3, 224, 224)).astype(np.float32)}


def has_tensorrt() -> bool:
    """Return whether TensorRT's library is there; ONNX Runtime names its provider also without it."""
    try:
        ctypes.CDLL("libnvinfer.so.10")
    except OSError:
        return False
    return True


@pytest.mark.parametrize("device", ["cuda:0", "tensorrt:0"])
def test_outputs_equal_those_of_the_cpu_or_the_device_is_refused(
    squeezenet: tuple[Path, Signature], device: str
) -> None:
    path, of = squeezenet
    if device.startswith("tensorrt") and not has_tensorrt():
        with pytest.raises(Failure, match="needs TensorRT 10") as caught:
            get_backend("onnxruntime").load(path, of, device, 1)
        assert caught.value.code is Code.UNAVAILABLE
        return
    on_gpu = get_backend("onnxruntime").load(path, of, device, 1)
    on_cpu = get_backend("onnxruntime").load(path, of, "cpu", 1)
    for rows in (1, 7, 16, 7):
        given = images(rows)
        np.testing.assert_allclose(on_gpu.run(given)[0], on_cpu.run(given)[0], atol=TOLERANCE)


def test_runs_are_nearly_as_fast_as_a_bare_loop(squeezenet: tuple[Path, Signature]) -> None:
    path, of = squeezenet
    instance = get_backend("onnxruntime").load(path, of, "cuda:0", 1)
    bare = onnxruntime.InferenceSession(path, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    given = images(ROWS)
    rates = [(rate(lambda: instance.run(given)), rate(lambda: bare.run(None, given))) for _ in range(3)]
    assert max(ours / theirs for ours, theirs in rates) >= OF_A_BARE_LOOP


def test_two_slots_overlap_copies_and_computation(squeezenet: tuple[Path, Signature]) -> None:
    path, of = squeezenet
    slots = [get_backend("onnxruntime").load(path, of, "cuda:0", 1) for _ in range(2)]
    given = images(ROWS)
    rounds = [(rate_of_both(slots, given), rate(lambda: slots[0].run(given))) for _ in range(5)]
    assert any(both > alone for both, alone in rounds), rounds


def rate(run: Callable[[], object]) -> float:
    run()
    began = time.perf_counter()
    for _ in range(RUNS):
        run()
    return RUNS / (time.perf_counter() - began)


def rate_of_both(slots: list[Instance], given: dict[str, np.ndarray]) -> float:
    def loop(slot: Instance) -> None:
        for _ in range(RUNS):
            slot.run(given)

    threads = [threading.Thread(target=loop, args=(slot,)) for slot in slots]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(slots) * RUNS / (time.perf_counter() - began)
