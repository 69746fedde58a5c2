"""A decoded v2 request, and how its parts besides the inputs are read: id, parameters, requested outputs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.json_document import (
    excerpt,
    expect_boolean,
    expect_parameters,
    expect_unsigned,
    raise_missing,
    raise_mistyped,
)
from millstream.gateway.tensors.output_options import Extensions, OutputOption, Span
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import ELEMENTS_MAX

ID_CHARACTERS_MAX = 4096

SEQUENCE_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")
SCALARS = (str, int, float, bool, type(None))
PARAMETERS_BYTES_MAX = 64 << 10  # custom ones of a request, as JSON, which may go to a worker with it
Scalar = str | int | float | bool
NO_PARAMETERS: Mapping[str, Scalar] = MappingProxyType({})
_SERVED = frozenset({"binary_data_output", "timeout", "priority", *SEQUENCE_PARAMETERS})


class Options(NamedTuple):
    """The parts of a request besides its inputs' data. Requests with the same envelope share one object."""

    rows: int  # dimension 0 when the version batches; 1 otherwise
    id: str = ""  # "": the request has none
    outputs: list[tuple[int, bool]] | None = None  # (index in the signature, binary) as requested; None: all
    binary_default: bool = False  # the form of the outputs when `outputs` is None
    timeout_s: float | None = None
    priority: int = 0  # 0: default; 1: highest; larger numbers come later
    output_options: dict[int, OutputOption] | None = None  # by index, for outputs that are not sent as plain tensors
    shared_memory_bytes: int = 0  # size of the inputs that were in shared memory
    parameters: Mapping[str, Scalar] = NO_PARAMETERS  # custom ones, for models that are told them


class InferCall(NamedTuple):
    """A decoded v2 inference request."""

    inputs: list[InputTensor]  # in the signature's order, one for every input
    options: Options


def read_options(
    document: dict[str, Any], rows: int, outputs: dict[str, int], model: str, extensions: Extensions
) -> Options:
    """Return everything in a request but `inputs`, checked. `outputs`: indices in the signature. Raises Failure.

    Members that are null count as absent, because some clients write every field of their classes.
    """
    request_id = document.get("id")
    if request_id is None:
        request_id = ""
    elif type(request_id) is not str:
        raise_mistyped("id", "string")
    elif len(request_id) > ID_CHARACTERS_MAX:
        raise invalid(f"the request's 'id' is longer than {ID_CHARACTERS_MAX} characters")
    else:
        try:
            request_id.encode()
        except UnicodeEncodeError:
            raise invalid("Unable to parse 'id': the string is not valid Unicode") from None
    parameters = document.get("parameters")
    binary_default, timeout_s, priority = (False, None, 0) if parameters is None else read_parameters(parameters)
    custom = NO_PARAMETERS if parameters is None else custom_parameters(parameters)
    requested = document.get("outputs")
    output_options: dict[int, OutputOption] = {}
    wanted = None if requested is None else _read_outputs(requested, outputs, model, extensions, output_options)
    return Options(
        rows, request_id, wanted, binary_default, timeout_s, priority, output_options or None, parameters=custom
    )


def read_parameters(value: object) -> tuple[bool, float | None, int]:
    """Return (binary_data_output, timeout in seconds, priority). Custom parameters may be any scalar.

    Raises Failure: INVALID, UNSUPPORTED for sequences.
    """
    parameters = expect_parameters(value)
    binary_default = False
    timeout_us = priority = 0
    for key, parameter in parameters.items():
        if key == "binary_data_output":
            binary_default = expect_boolean(parameter, key)
        elif key == "timeout":
            timeout_us = expect_unsigned(parameter, key)
        elif key == "priority":
            priority = expect_unsigned(parameter, key)
        elif key in SEQUENCE_PARAMETERS:
            if parameter:
                raise Failure(Code.UNSUPPORTED, f"sequences are not supported: leave out the parameter '{key}'")
        elif key.startswith("triton_"):
            raise invalid(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        elif type(parameter) not in SCALARS:
            raise invalid(f"parameter '{excerpt(key)}' must be a string, a number or a boolean")
    return binary_default, timeout_us / 1e6 if timeout_us else None, priority


def custom_parameters(parameters: Mapping[str, Any]) -> Mapping[str, Scalar]:
    """Return the parameters of a checked request that only models understand; those that are null are absent.

    Raises Failure(INVALID).
    """
    custom = {key: value for key, value in parameters.items() if key not in _SERVED and value is not None}
    if custom and len(_written(custom)) > PARAMETERS_BYTES_MAX:
        raise invalid(f"the parameters of a request take more than {PARAMETERS_BYTES_MAX} bytes")
    return custom


def _written(parameters: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(parameters)
    except TypeError:  # a surrogate, or a number beyond 64 bits
        raise invalid("a parameter is a text that is not valid Unicode, or a number beyond 64 bits") from None


def _read_outputs(
    requested: object,
    known: dict[str, int],
    model: str,
    extensions: Extensions,
    output_options: dict[int, OutputOption],
) -> list[tuple[int, bool]] | None:
    if type(requested) is not list:
        raise_mistyped("outputs", "array")
    chosen: dict[int, bool] = {}
    for item in requested:
        if type(item) is not dict:
            raise_mistyped("outputs", "object")
        name = item.get("name")
        if name is None:
            raise_missing("name", " in 'outputs'")
        if type(name) is not str:
            raise_mistyped("name", "string", " in 'outputs'")
        index = known.get(name)
        if index is None:
            raise invalid(f"unexpected inference output '{excerpt(name)}' for model '{model}'")
        if index in chosen:
            raise invalid(f"output '{name}' already exists in request")
        where = f" for output '{name}'"
        parameters = expect_parameters(item.get("parameters"), where)
        chosen[index] = expect_boolean(parameters.get("binary_data") or False, "binary_data", where)
        option = read_output_option(parameters, index, extensions, where)
        if option is not None:
            output_options[index] = option
    return list(chosen.items()) or None  # an empty list requests all outputs


def read_output_option(
    parameters: dict[str, Any], index: int, extensions: Extensions, where: str
) -> OutputOption | None:
    """Return how an output is sent that is not sent as a plain tensor. Raises Failure."""
    if "classification" not in parameters and "shared_memory_region" not in parameters:
        return None
    classes = expect_unsigned(parameters.get("classification") or 0, "classification", where)
    return extensions.option(index, classes, read_span(parameters, where))


def read_span(parameters: dict[str, Any], where: str) -> Span | None:
    """Return the part of a client's shared memory that `parameters` name, if any. Raises Failure(INVALID)."""
    region = parameters.get("shared_memory_region")
    if region is None:
        return None
    if type(region) is not str:
        raise_mistyped("shared_memory_region", "string", where)
    if "shared_memory_byte_size" not in parameters:
        raise_missing("shared_memory_byte_size", where)
    offset = expect_unsigned(parameters.get("shared_memory_offset") or 0, "shared_memory_offset", where)
    size_bytes = expect_unsigned(parameters["shared_memory_byte_size"], "shared_memory_byte_size", where)
    if offset + size_bytes > ELEMENTS_MAX:
        raise invalid(f"Invalid offset + byte size for shared memory region: '{excerpt(region)}'")
    return Span(region, offset, size_bytes)
