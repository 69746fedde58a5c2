"""Caches requests without their numbers (envelopes), so that each envelope is checked only once.

{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[ 1.5,2,0,4 ]}]}      JSON: prefix, numbers, suffix
{"inputs":[{"name":"x", … "parameters":{"binary_data_size":16}}]} 16 bytes          binary: the whole JSON part

Only envelopes of requests without an id are cached, after the request was decoded in full. JSON is read from
left to right, so two bodies with the same prefix and suffix around a flat list differ in that list only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeVar

import orjson

from millstream.gateway.tensors.input_plan import InputPlan
from millstream.gateway.tensors.inputs import ABSENT
from millstream.gateway.v2.call import InferCall, Options

PREFIX_BYTES_MAX = 1024
_SUFFIX_BYTES_MAX = 512
_ENVELOPES_MAX = 256

#: prefix up to the numbers' "[", suffix from their "]" on, function that packs the shape's count of numbers, shape,
#: bytes in raw form, options
JsonEnvelope = tuple[bytes, bytes, Callable[..., bytes], tuple[int, ...], int, Options]

#: JSON part; bytes of the whole body; shape, start, end of each input in the signature's order; options
BinaryEnvelope = tuple[bytes, int, list[tuple[tuple[int, ...], int, int]], Options]

_Envelope = TypeVar("_Envelope", JsonEnvelope, BinaryEnvelope)

# In place of a number this is a string; inside a string it ends that string, and the rest is not JSON.
_PROBE = b'"~"'


def remember(envelopes: dict[bytes, _Envelope], key: bytes, envelope: _Envelope) -> None:
    """Cache `envelope`. A full cache is emptied: envelopes in use return with their next request."""
    if len(envelopes) >= _ENVELOPES_MAX:
        envelopes.clear()
    envelopes[key] = envelope


def json_envelope(call: InferCall, body: bytes, plan: InputPlan) -> tuple[bytes, JsonEnvelope] | None:
    """Return prefix + suffix of `body` as its key, and its envelope, if its data is one flat list of numbers."""
    start = body.rfind(b"[")
    end = body.find(b"]", start)
    if plan.code is None or not 0 < start < PREFIX_BYTES_MAX or len(body) - end > _SUFFIX_BYTES_MAX:
        return None
    prefix, suffix = body[: start + 1], body[end:]
    try:
        data: Any = orjson.loads(prefix + _PROBE + suffix)["inputs"][0].get("data")
    except orjson.JSONDecodeError:
        return None
    while type(data) is list and len(data) == 1:
        data = data[0]
    if data != "~":
        return None
    tensor = call.inputs[0]
    pack = struct.Struct(f"{tensor.size_bytes // plan.item_bytes}{plan.code}").pack
    return prefix + suffix, (prefix, suffix, pack, tensor.shape, tensor.size_bytes, call.options)


def binary_envelope(
    call: InferCall, text: bytes, items: list[dict[str, Any]], plans: dict[str, InputPlan]
) -> BinaryEnvelope | None:
    """Return the envelope of a body with all its inputs in binary form.

    Args:
        call: the decoded request.
        text: its JSON part.
        items: the elements of `inputs` in it.
        plans: plans of the version's inputs, by name.
    """
    tensors: dict[int, tuple[tuple[int, ...], int, int]] = {}
    at = len(text)
    for item in items:
        plan = plans[item["name"]]
        if "binary_data_size" not in (item.get("parameters") or {}) or not plan.opaque:
            return None
        tensor = call.inputs[plan.index]
        tensors[plan.index] = (tensor.shape, at, at + tensor.size_bytes)
        at += tensor.size_bytes
    absent = (ABSENT.shape, 0, 0)
    return text, at, [tensors.get(index, absent) for index in range(len(plans))], call.options
