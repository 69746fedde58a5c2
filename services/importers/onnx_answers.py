"""Runs an ONNX model that another format brought with it, for the samples. Runs in the import process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from millstream.services.errors import invalid
from millstream.services.importers.base import Array, Sample

ROWS = 16
_SEED = 20
_NUMPY = {
    "float": np.float32, "double": np.float64, "float16": np.float16, "int64": np.int64, "int32": np.int32,
    "int16": np.int16, "int8": np.int8, "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32,
    "uint64": np.uint64, "bool": np.bool_,
}  # fmt: skip


def answered(path: Path) -> Sample:
    """Return inputs drawn for the model at `path`, and its outputs that are tensors. Raises Failure(INVALID)."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        inputs = {one.name: _drawn(one) for one in session.get_inputs()}
        outputs = session.run(None, inputs)
    except Exception as error:
        raise invalid(f"the ONNX model does not run: {' '.join(str(error).split())[:300]}") from error
    names = [one.name for one in session.get_outputs()]
    answers = zip(names, outputs, strict=True)
    return Sample(inputs, {name: output for name, output in answers if isinstance(output, np.ndarray)})


def _drawn(one: Any) -> Array:
    random = np.random.default_rng(_SEED)
    shape = [size if isinstance(size, int) else (1 if at else ROWS) for at, size in enumerate(one.shape)]
    kind = one.type.removeprefix("tensor(").removesuffix(")")
    if kind == "string":
        return np.full(shape, "text", dtype=object)
    values = random.standard_normal(shape) if "float" in kind or kind == "double" else random.integers(0, 2, shape)
    return np.asarray(values).astype(_NUMPY[kind])
