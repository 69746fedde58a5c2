"""Models of Triton's Python backend, as people write them, in a model repository."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

CONFIG = """
backend: "python"
max_batch_size: {rows}
input [{{ name: "x" data_type: TYPE_{datatype} dims: [ {dims} ] }}]
output [{{ name: "y" data_type: TYPE_{datatype} dims: [ {dims} ] }}]
{more}
"""
_MODEL = """
import asyncio, json, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils


def x_of(request):
    return pb_utils.get_input_tensor_by_name(request, "x").as_numpy()


def answer(array):
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("y", array)])


class TritonPythonModel:
{body}
"""


def write_model(
    repository: Path,
    name: str,
    body: str,
    *,
    datatype: str = "FP32",
    dims: str = "2",
    rows: int = 8,
    more: str = "",
    config: bool = True,
) -> Path:
    """Write a model whose class has `body`, with an input `x` and an output `y`; return its file.

    `more`: of its configuration. `config`: whether it has one.
    """
    path = repository / name / "1" / "model.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = dedent(body).strip().splitlines()
    path.write_text(_MODEL.format(body="\n".join(f"    {line}" for line in lines)))
    if config:
        text = CONFIG.format(rows=rows, datatype=datatype, dims=dims, more=more)
        (repository / name / "config.pbtxt").write_text(text)
    return path


DOUBLE = """
def execute(self, requests):
    return [answer(2 * x_of(request)) for request in requests]
"""
