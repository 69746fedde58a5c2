"""Checks that the installed ONNX Runtime supports a model; otherwise says what the model's author can do.

Imported by the checker process only.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import onnx
import onnxruntime
from onnx import TensorProto, helper

from millstream.services.errors import Failure, invalid
from millstream.services.ingest.graph import nodes, tensors
from millstream.services.model.onnxruntime_values import library_message

_OPSET = re.compile(r"official support for domain (\S+) is till opset (\d+)")
_IR = re.compile(r"max supported IR version: (\d+)")
_MEMORY = re.compile(r"bad.?alloc|allocate memory|out of memory|unable to allocate", re.IGNORECASE)
MESSAGE_CHARACTERS_MAX = 600


def check_opsets(model: onnx.ModelProto) -> None:
    """Raise Failure(INVALID) for a model that names no opset."""
    if not model.opset_import:
        raise invalid("the model names no opset: export it again, or set opset_import")


def check_versions(model: onnx.ModelProto) -> None:
    """Raise Failure(INVALID) for opsets or an IR version that are too new, by loading a model of one node with them.

    For models that failed: ONNX Runtime loads no model with such versions, and a session takes long to create.
    """
    imports = {entry.domain: entry.version for entry in model.opset_import}
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [value], [result])
    if not {"", "ai.onnx"} & imports.keys():
        imports[""] = 13
    probe = helper.make_model(graph, opset_imports=[helper.make_opsetid(d, v) for d, v in imports.items()])
    probe.ir_version = model.ir_version
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _version_failure(str(error), imports, model.ir_version) from error


def _version_failure(text: str, imports: dict[str, int], ir_version: int) -> Failure:
    runtime = f"this server's ONNX Runtime {onnxruntime.__version__}"
    if match := _OPSET.search(text):
        domain = "" if match[1] == "ai.onnx" else match[1]
        used = imports.get(domain, imports.get(match[1], 0))
        return invalid(
            f"opset {used} of {match[1]} is newer than {runtime} supports (at most {match[2]}): export the model "
            f"again with opset_version={match[2]} or lower"
        )
    if match := _IR.search(text):
        return invalid(
            f"IR version {ir_version} is newer than {runtime} supports (at most {match[1]}): export the model with "
            f"an older onnx package, or set model.ir_version = {match[1]} and save it again"
        )
    return invalid(f"{runtime} does not accept the model's opsets: {_message(text)}")


@cache
def known_operators() -> frozenset[tuple[str, str]]:
    """Return the domain and name of each operator that ONNX Runtime has; "" is the domain of ONNX."""
    schemas = onnxruntime.capi.onnxruntime_pybind11_state.get_all_operator_schema()
    return frozenset((schema.domain, schema.name) for schema in schemas)


def check_operators(model: onnx.ModelProto) -> None:
    """Raise Failure(INVALID) for operators that neither ONNX Runtime nor the model defines."""
    known = known_operators() | {(_domain(function.domain), function.name) for function in model.functions}
    for node in nodes(model):
        domain = _domain(node.domain)
        if (domain, node.op_type) in known:
            continue
        if domain:
            raise invalid(
                f"operator {node.op_type} of domain {domain!r} is not part of ONNX Runtime {onnxruntime.__version__} "
                "and custom operator libraries are not loaded: export the model with standard operators"
            )
        raise invalid(f"operator {node.op_type} is unknown to ONNX Runtime {onnxruntime.__version__}")


def structure_defect(model: onnx.ModelProto, path: Path | None) -> str:
    """Return how the model breaks the rules of ONNX, by ONNX's own checker, worded to follow "it"; "" if it does not.

    ONNX Runtime loads much that the checker does not accept.

    Args:
        model: the model.
        path: its file; None: it is not what a file has, or its weights are in other files, which
            `external_data` checks.
    """
    try:
        onnx.checker.check_model(path or _without_external(model))
    except MemoryError:
        raise
    except Exception as error:
        return f"breaks the rules of ONNX: {_message(error, path)}"
    return ""


def _without_external(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with empty tensors for those in other files, where the checker refuses links, which are fine."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in tensors(copy):
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0]))
    return copy


def _message(error: object, path: Path | None = None) -> str:
    return library_message(error, path, MESSAGE_CHARACTERS_MAX) or "no reason given"


def is_out_of_memory(text: str) -> bool:
    """Return whether a library's message says that memory ran out."""
    return bool(_MEMORY.search(text))


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain
