"""Triton's generate extension: reads a JSON object of inputs, writes a JSON object of outputs. Pure.

Source: Triton, "Generate Extension": members that name inputs are tensors, `id` and `parameters` are special, all
others are parameters; a tensor of one element is written without a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from millstream.gateway.scheduling.caller import RequestOptions
from millstream.gateway.tensors.input_plans import InputPlans, Inputs, join
from millstream.gateway.tensors.json_document import excerpt, expect_parameters, expect_unsigned, raise_mistyped
from millstream.gateway.tensors.json_text import parse_json
from millstream.gateway.tensors.nested_lists import row_of_lists
from millstream.gateway.tensors.outputs import OutputTensor, answered, text_of
from millstream.gateway.tensors.prepared import expect_tensors
from millstream.gateway.v2.options import ID_CHARACTERS_MAX, SCALARS
from millstream.services.errors import invalid
from millstream.services.model.manifest import Manifest


class GenerateRequest(NamedTuple):
    """A generate request. `id` is "" if the client sent none."""

    inputs: Inputs
    id: str
    options: RequestOptions


def read(plans: InputPlans, body: bytes) -> GenerateRequest:
    """Return the request in `body`. Raises Failure(INVALID)."""
    document = parse_json(body, plans.json_limits, number_lists=True)
    request_id = document.pop("id", None) or ""
    if type(request_id) is not str:
        raise_mistyped("id", "string")
    if len(request_id) > ID_CHARACTERS_MAX:
        raise invalid(f"the request's 'id' is longer than {ID_CHARACTERS_MAX} characters")
    parameters = expect_parameters(document.pop("parameters", None))
    named = {plan.name for plan in plans}
    found = {name: row_of_lists(plans.named(name), value) for name, value in document.items() if name in named}
    expect_tensors(plans, document)
    for name, value in document.items():
        if name not in named and type(value) not in SCALARS:
            raise invalid(f"'{excerpt(name)}' is not an input of model '{plans.model}', and a parameter is a scalar")
        if name not in named:
            parameters[name] = value
    timeout_us = expect_unsigned(parameters.get("timeout", 0), "timeout")
    priority = expect_unsigned(parameters.get("priority", 0), "priority")
    return GenerateRequest(
        join(plans, found), request_id, RequestOptions(timeout_us / 1e6 if timeout_us else None, priority)
    )


def write(manifest: Manifest, prompt_id: str, outputs: Sequence[OutputTensor]) -> bytes:
    """Return the body of the reply. Raises Failure(INVALID) for bytes that are not text."""
    pairs = [
        b"%b:%b" % (orjson.dumps(spec.name), _value(output)) for spec, output in answered(manifest.answered, outputs)
    ]
    head: dict[str, Any] = {"id": prompt_id} if prompt_id else {}
    head |= {"model_name": manifest.model, "model_version": str(manifest.version)}
    text = orjson.dumps({name: _unicode(value) for name, value in head.items()})
    return b"{%b,%b" % (b",".join(pairs), text[1:])


def _value(output: OutputTensor) -> bytes:
    """Return the output as a flat JSON array, as in v2; a single element without an array."""
    array = output.array
    count = len(array) if isinstance(array, list) else array.size
    text = text_of(output._replace(shape=(count,)))
    return text[1:-1] if count == 1 else text


def _unicode(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def event(text: bytes) -> bytes:
    """Return one event of a stream (WHATWG, "Server-sent events")."""
    return b"data: %b\n\n" % text
