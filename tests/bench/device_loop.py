"""Measures a worker's instance against a bare loop of ONNX Runtime on the same device, at the same batch.

The two take turns in this process, so that clocks and heat of the device are those of both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime

from millstream.services.model.signature import Signature, TensorSpec
from millstream.workers.backends import get_backend

ROWS = 64
TURNS = 5


class Rates(NamedTuple):
    """Runs per second, in each turn."""

    ours: list[float]
    bare: list[float]


def gpu_available() -> bool:
    """Return whether ONNX Runtime can run on CUDA here."""
    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def measure(path: Path, device: str, seconds: float, rows: int = ROWS) -> Rates:
    """Measure SqueezeNet at `path` on "cpu" or "cuda:0", TURNS times `seconds` each. Raises Failure without the device.

    The bare loop has one thread on a CPU, as the instance has.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    providers = ["CPUExecutionProvider"] if device == "cpu" else ["CUDAExecutionProvider", "CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(path, options, providers=providers)
    (given,), (taken,) = session.get_inputs(), session.get_outputs()
    shape = tuple(dim if isinstance(dim, int) else -1 for dim in taken.shape)
    signature = Signature(
        inputs=(TensorSpec(name=given.name, datatype="FP32", shape=(-1, *given.shape[1:])),),
        outputs=(TensorSpec(name=taken.name, datatype="FP32", shape=(-1, *shape[1:])),),
        batching=True,
    )
    instance = get_backend("onnxruntime").load(path, signature, device, 1)
    inputs = {given.name: np.random.default_rng(0).standard_normal((rows, *given.shape[1:])).astype(np.float32)}
    rates = Rates([], [])
    try:
        for _ in range(TURNS):
            rates.ours.append(_rate(lambda: instance.run(inputs), seconds))
            rates.bare.append(_rate(lambda: session.run(None, inputs), seconds))
    finally:
        instance.close()
    return rates


def _rate(run: Callable[[], object], seconds: float) -> float:
    run()
    runs, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        run()
        runs += 1
    return runs / spent
