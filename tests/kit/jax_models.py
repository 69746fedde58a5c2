"""Functions that jax.export serializes. Only tests in tests/frameworks may call these."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WEIGHTS = np.random.default_rng(7).standard_normal((8, 4)).astype(np.float32)


def save(path: Path, function: Callable[..., Any], *specs: tuple[str, tuple[int | str, ...]], **options: Any) -> Path:
    """Export `function` for inputs of these dtypes and shapes; texts in shapes are variable sizes of that name."""
    import jax
    from jax import export

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    scope = export.SymbolicScope()
    shaped = [
        jax.ShapeDtypeStruct(
            export.symbolic_shape(",".join(map(str, shape)) + ("," if len(shape) == 1 else ""), scope=scope)
            if any(isinstance(dim, str) for dim in shape)
            else shape,
            dtype,
        )
        for dtype, shape in specs
    ]
    path.write_bytes(export.export(jax.jit(function), **options)(*shaped).serialize())
    return path


def dtype_of(datatype: str) -> str:
    """Return numpy's name of a v2 datatype."""
    floats = {"FP16": "float16", "BF16": "bfloat16", "FP32": "float32", "FP64": "float64"}
    return floats.get(datatype) or datatype.lower()


def identity(path: Path, datatype: str = "FP32") -> Path:
    """ "x" [N, 2] -> {"y": the same}."""
    return save(path, lambda x: {"y": x}, (dtype_of(datatype), ("b", 2)))


def weighty(path: Path, size_bytes: int) -> Path:
    """ "x" FP32 [N, 1] -> {"y": x plus the mean of many weights}."""
    weights = np.random.default_rng(0).standard_normal(size_bytes // 4).astype(np.float32)
    return save(path, lambda x: {"y": x + weights[0] + x[:1] * weights[-1] * 0}, ("float32", ("b", 1)))


def mlp(path: Path, rows: int | str = "b", **options: Any) -> Path:
    """ "x" FP32 [rows, 8] -> FP32 [rows, 4], softmax of a product."""
    import jax

    return save(path, lambda x: jax.nn.softmax(jax.nn.relu(x) @ WEIGHTS), ("float32", (rows, 8)), **options)


def mlp_answers(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return what `mlp` computes, by numpy."""
    scores = np.exp(np.maximum(x, 0) @ WEIGHTS)
    answers: np.ndarray[Any, Any] = scores / scores.sum(1, keepdims=True)
    return answers


def cnn(path: Path, rows: int | str = "b") -> Path:
    """ "x" FP32 [rows, 16, 16, 3] -> FP32 [rows, 5]: convolution, pooling, mean and a product."""
    import jax

    generator = np.random.default_rng(1)
    kernel = generator.standard_normal((3, 3, 3, 8)).astype(np.float32)
    head = generator.standard_normal((8, 5)).astype(np.float32)

    def function(x: Any) -> Any:
        found = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        found = jax.nn.relu(found)
        pooled = jax.lax.reduce_window(found, -np.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return pooled.mean((1, 2)) @ head

    return save(path, function, ("float32", (rows, 16, 16, 3)))
