"""Measures ONNX Runtime alone: one row after the other through one session with one thread.

python -m tests.bench.raw_loop MODEL SECONDS          # prints rows per second
"""

from __future__ import annotations

import sys
import time

import numpy as np
import onnxruntime


def rate(path: str, seconds: float) -> float:
    """Return the rows per second of a session with one thread, over `seconds` after a second of warm-up."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    row = np.random.default_rng(0).standard_normal((1, *given.shape[1:])).astype(np.float32)
    outputs = [output.name for output in session.get_outputs()]
    warm = time.perf_counter() + 1
    while time.perf_counter() < warm:
        session.run(outputs, {given.name: row})
    rows, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        session.run(outputs, {given.name: row})
        rows += 1
    return rows / (time.perf_counter() - began)


if __name__ == "__main__":
    print(rate(sys.argv[1], float(sys.argv[2])))
