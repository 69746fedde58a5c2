"""Programs that torch.export saves. Only tests that are marked `needs("torch")` may call these."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tests.kit import torch_library

#: v2 datatype -> name of the dtype in torch
DTYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "BF16": "bfloat16",
    "FP32": "float32",
    "FP64": "float64",
}


@functools.cache
def _torch() -> Any:
    torch_library.add()
    import torch

    return torch


def _save(path: Path, module: Any, *examples: Any) -> Path:
    """Export with variable rows in every input."""
    torch = _torch()
    rows = torch.export.Dim.DYNAMIC
    program = torch.export.export(module.eval(), examples, dynamic_shapes=tuple({0: rows} for _ in examples))
    torch.export.save(program, path)
    return path


def identity(path: Path, datatype: str = "FP32") -> Path:
    """ "x" [N, 2] -> the same tensor."""
    torch = _torch()

    class Identity(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return x.clone()

    return _save(path, Identity(), torch.zeros(3, 2, dtype=getattr(torch, DTYPES[datatype])))


def weighty(path: Path, size_bytes: int) -> Path:
    """ "x" FP32 [N, 1] -> x plus the first of many weights."""
    torch = _torch()

    class Weighty(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Parameter(torch.randn(size_bytes // 4))

        def forward(self, x: Any) -> Any:
            return x + self.weights[0]

    return _save(path, Weighty(), torch.zeros(3, 1))


def laborious(path: Path, on: int, side: int = 2048, products: int = 400) -> Path:
    """ "x" INT64 [N, 1] -> x; an element equal to `on` causes matrix products that take minutes."""
    torch = _torch()

    class Laborious(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            wanted = torch.where((x == on).any(), side, 1).item()
            torch._check(wanted >= 1)
            torch._check(wanted <= side)
            first = torch.zeros(wanted, wanted)
            product = first
            for _ in range(products):
                product = product @ first
            return x + product.amax().to(torch.int64)

    return _save(path, Laborious(), torch.zeros(3, 1, dtype=torch.int64))


def sum_and_difference(path: Path) -> Path:
    """ "a", "b" FP32 [N, 4] -> a + b, a - b."""
    torch = _torch()

    class SumAndDifference(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, a: Any, b: Any) -> Any:
            return a + b, a - b

    return _save(path, SumAndDifference(), torch.zeros(3, 4), torch.zeros(3, 4))


def fixed(path: Path) -> Path:
    """ "x" FP32 [1, 4] -> x + 1: no variable dimension."""
    torch = _torch()

    class Fixed(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return x + 1

    torch.export.save(torch.export.export(Fixed().eval(), (torch.zeros(1, 4),)), path)
    return path


def mean_of_rows(path: Path) -> Path:
    """ "x" FP32 [N, 4] -> x minus the mean of all rows."""
    torch = _torch()

    class MeanOfRows(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return x - x.mean(0)

    return _save(path, MeanOfRows(), torch.zeros(3, 4))


def named(path: Path) -> Path:
    """ "x" FP32 [N, 3], by name "scale" FP32 [N, 1] -> {"scaled": x * scale, "negated": -x}."""
    torch = _torch()

    class Named(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, *, scale: Any) -> Any:
            return {"scaled": x * scale, "negated": -x}

    rows = torch.export.Dim("rows")
    program = torch.export.export(
        Named().eval(),
        (torch.zeros(3, 3),),
        {"scale": torch.zeros(3, 1)},
        dynamic_shapes={"x": {0: rows}, "scale": {0: rows}},
    )
    torch.export.save(program, path)
    return path
