"""parameters: reads parameters of gRPC requests, each from the field of its type. Pure.

Source: Triton's extensions "schedule policy", "sequence", "parameters", "classification" and "shared memory"; MLServer,
"Content Types".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream.gateway.scheduling.caller import DEFAULT_OPTIONS, RequestOptions
from millstream.gateway.tensors.json_document import excerpt
from millstream.gateway.v2.options import SEQUENCE_PARAMETERS
from millstream.services.errors import Code, Failure, invalid

_INTEGER = ("int64_param",)
_STRING = ("string_param",)
_BOOLEAN = ("bool_param",)
#: name -> fields that may hold it. Parameters of other names are for the model, and are not checked.
_REQUEST = {
    "priority": ("int64_param", "uint64_param"),
    "timeout": _INTEGER,
    "sequence_id": ("int64_param", "string_param"),
    "sequence_start": _BOOLEAN,
    "sequence_end": _BOOLEAN,
    "triton_enable_empty_final_response": _BOOLEAN,
}
_TENSOR = {
    "classification": _INTEGER,
    "content_type": _STRING,
    "shared_memory_region": _STRING,
    "shared_memory_byte_size": _INTEGER,
    "shared_memory_offset": _INTEGER,
}


def read_request_options(parameters: Mapping[str, Any]) -> RequestOptions:
    """Return the options in a request's parameters. Raises Failure: INVALID, UNSUPPORTED for sequences."""
    timeout_us = priority = 0
    for name, parameter in parameters.items():
        fields = _REQUEST.get(name)
        if fields is None:
            if name.startswith("triton_"):
                raise invalid(
                    "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
                )
            if parameter.WhichOneof("parameter_choice") is None:
                raise invalid(f"parameter '{excerpt(name)}' must be a string, a number or a boolean")
            continue
        value = _value(name, parameter, fields)
        if name in SEQUENCE_PARAMETERS:
            if value:
                raise Failure(Code.UNSUPPORTED, f"sequences are not supported: leave out the parameter '{name}'")
        elif name == "timeout":
            timeout_us = _not_negative(name, value)
        elif name == "priority":
            priority = _not_negative(name, value)
    if not timeout_us and not priority:
        return DEFAULT_OPTIONS
    return RequestOptions(timeout_us / 1e6 if timeout_us else None, priority)


def read_tensor(parameters: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the known parameters of an input or output. Raises Failure(INVALID) for a value of another type."""
    values: dict[str, Any] = {}
    for name, parameter in parameters.items():
        fields = _TENSOR.get(name)
        if fields is None:
            continue
        value = _value(name, parameter, fields, where)
        if name == "classification" and value <= 0:
            raise invalid(f"invalid value for 'classification' parameter, expected a number above 0{where}")
        values[name] = value if fields is _STRING else _not_negative(name, value, where)
    return values


def _value(name: str, parameter: Any, fields: tuple[str, ...], where: str = "") -> Any:
    field = parameter.WhichOneof("parameter_choice")
    if field not in fields:
        raise invalid(f"invalid value type for '{name}' parameter, expected {' or '.join(fields)}.{where}")
    return getattr(parameter, field)


def _not_negative(name: str, value: int, where: str = "") -> int:
    if value < 0:
        raise invalid(f"the parameter '{name}' should be at least 0, got {value}{where}")
    return value
