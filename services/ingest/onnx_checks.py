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
from millstream.services.ingest.graph import nodes
from millstream.services.model.onnxruntime_values import library_message

_OPSET = re.compile(r"official support for domain (\S+) is till opset (\d+)")
_IR = re.compile(r"max supported IR version: (\d+)")
_MEMORY = re.compile(r"bad.?alloc|allocate memory|out of memory|unable to allocate", re.IGNORECASE)
_HARD_LINKS = "multiple hard links"
_NO_SHAPE = "Field 'shape' of 'type' is required"
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


def check_structure(path: Path, *, in_place: bool, shapes_declared: bool) -> None:
    """Run ONNX's own checker on the model. Raises Failure(INVALID).

    Args:
        path: the model's file.
        in_place: accept weight files with several hard links: rewritten models have them, and folders that share files
            do. Files of an archive never have them.
        shapes_declared: accept inputs and outputs without a shape, since the model's configuration has them.
    """
    try:
        onnx.checker.check_model(path)
    except MemoryError:
        raise
    except Exception as error:
        if (in_place and _HARD_LINKS in str(error)) or (shapes_declared and _NO_SHAPE in str(error)):
            return  # the checker stopped early; ONNX Runtime rejects any further defect when it loads the model
        raise invalid(f"the model breaks the rules of ONNX: {_message(error, path)}") from error


def _message(error: object, path: Path | None = None) -> str:
    return library_message(error, path, MESSAGE_CHARACTERS_MAX) or "no reason given"


def is_out_of_memory(text: str) -> bool:
    """Return whether a library's message says that memory ran out."""
    return bool(_MEMORY.search(text))


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain
