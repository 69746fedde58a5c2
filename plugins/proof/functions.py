"""Expands operators that are defined by other operators: functions of the model and of the ONNX standard.

Source: ONNX IR specification, "Functions": an attribute of the body may refer to an attribute of the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, Protocol

import onnx

from millstream.plugins.proof.node import Call
from millstream.plugins.proof.value import AnyValue, Dependent, Mixed

Scope = MutableMapping[str, AnyValue | None]


class FunctionHost(Protocol):
    """The part of the interpreter that functions need."""

    def walk(
        self,
        nodes: Iterable[onnx.NodeProto],
        scope: Scope,
        versions: Mapping[str, int],
        references: Mapping[str, onnx.AttributeProto] | None,
    ) -> None: ...


def opsets(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Return the opset versions by domain; the domain of ONNX itself is ""."""
    return {"" if item.domain == "ai.onnx" else item.domain: item.version for item in imports}


def expand(host: FunctionHost, function: onnx.FunctionProto, call: Call) -> list[AnyValue]:
    """Return the outputs of a function of the model for the operands of a call."""
    references = {attribute.name: attribute for attribute in function.attribute_proto}
    references.update(call.attributes)
    return _run(host, function, call, references)


def expand_schema(host: FunctionHost, call: Call) -> list[AnyValue]:
    """Return the outputs of an operator that the standard defines as a function. Raises Dependent for any other."""
    try:
        schema: Any = onnx.defs.get_schema(call.op, call.version, call.domain)
    except onnx.defs.SchemaError:
        raise Dependent("this operator is not known") from None
    versions = [version for version in schema.function_opset_versions if version <= call.version]
    if not versions:
        raise Dependent("nothing is known about how this operator treats rows")
    function = onnx.FunctionProto.FromString(schema.get_function_with_opset_version(max(versions)))
    references = {
        name: attribute.default_value for name, attribute in schema.attributes.items() if attribute.default_value.name
    }
    references.update(call.attributes)
    return _run(host, function, call, references)


def _run(
    host: FunctionHost, function: onnx.FunctionProto, call: Call, references: Mapping[str, onnx.AttributeProto]
) -> list[AnyValue]:
    scope: Scope = dict.fromkeys(function.input)
    scope.update(zip(function.input, call.inputs, strict=False))
    host.walk(function.node, scope, opsets(function.opset_import), references)
    missing = Mixed("a function", "it does not compute one of its outputs")
    return [scope.get(name) or missing for name in function.output]
