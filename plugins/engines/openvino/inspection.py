"""Inspects a model in OpenVINO's own format (model.xml, model.bin), to which importers convert what ONNX cannot say.

read ─> inputs and outputs ─> trials (ingest.inspection)

Imported by the checker process only; OpenVINO must be installed where the gateway runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millstream.services.errors import invalid
from millstream.services.ingest.inspection import inspect_program
from millstream.services.ingest.model_io import ModelTensor
from millstream.services.ingest.report import CheckedModel, CheckTask
from millstream.services.ingest.trial_session import Array, TrialProgram
from millstream.services.model.datatypes import NUMPY

FORMAT = "openvino"
#: v2 datatypes by OpenVINO's names, those that its CPU plug-in computes
_DATATYPES = {
    "boolean": "BOOL", "u8": "UINT8", "u16": "UINT16", "i8": "INT8", "i16": "INT16", "i32": "INT32", "i64": "INT64",
    "f16": "FP16", "f32": "FP32",
}  # fmt: skip


def inspect(task: CheckTask, path: Path) -> CheckedModel:
    """Check the model at `path` and return how it is served. Raises Failure(INVALID)."""
    library = _import_openvino()
    try:
        from openvino.frontend import FrontEndManager

        reader = FrontEndManager().load_by_framework("ir")
        model = library.Core().compile_model(
            reader.convert(reader.load(str(path))),
            "CPU",
            {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1},
        )
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise invalid(f"OpenVINO cannot read {path.name}: {lines[-1][:300]}") from error
    inputs, outputs = ([_tensor(port) for port in ports] for ports in (model.inputs, model.outputs))

    def run(arrays: Sequence[Array]) -> list[Array]:
        found = model([np.ascontiguousarray(array) for array in arrays])
        return [
            np.array(found[port]).astype(NUMPY[tensor.datatype], copy=False)
            for port, tensor in zip(model.outputs, outputs, strict=True)
        ]

    weights = path.with_suffix(".bin")
    program = TrialProgram(
        kind="the model",
        inputs=inputs,
        outputs=outputs,
        run=run,
        unproven="graphs of OpenVINO are not analysed",
        source_format=FORMAT,
        producer=f"openvino {library.get_version().partition('-')[0]}",
        files=(weights,) if weights.is_file() else (),
    )
    return inspect_program(task, path, program)


def _tensor(port: Any) -> ModelTensor:
    name = port.get_any_name()
    element = port.get_element_type().get_type_name()
    shape = port.get_partial_shape()
    if element not in _DATATYPES or shape.rank.is_dynamic:
        raise invalid(f"tensor {name[:80]!r} has elements of type {element} or no shape: OpenVINO cannot serve it")
    dims = [None if dim.is_dynamic else dim.get_length() for dim in shape]
    return ModelTensor(name, _DATATYPES[element], tuple(dims))


def _import_openvino() -> Any:
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type] # reports each import to its makers
    try:
        import openvino
    except ImportError as error:
        raise invalid(
            f"the model is checked with OpenVINO, which the gateway does not have ({error}): install "
            "millstream[openvino] where the gateway runs"
        ) from error
    return openvino
