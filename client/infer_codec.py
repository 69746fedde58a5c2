"""Encodes inference requests and decodes replies for the client. Pure.

inputs -> JSON header + raw tensors; reply -> arrays by output name
Source: Open Inference Protocol v2, inference and binary tensor data extension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millstream.client.call import json_of
from millstream.client.documents import Metadata
from millstream.client.inputs import Given, about_input
from millstream.client.replies import parse_json
from millstream.client.tensors import Array, decode, encode, from_data, random_input
from millstream.services.errors import Code, Failure


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """A request's body; `header_bytes` is the length of the JSON before its raw tensors, None if it is only JSON."""

    body: bytes
    header_bytes: int | None


@dataclass(frozen=True, slots=True)
class DecodedReply:
    """A reply's JSON, and its outputs by name in the reply's order."""

    document: dict[str, Any]
    outputs: dict[str, Array]


def encode_request(
    given: Iterable[Given],
    *,
    binary_outputs: bool = True,
    outputs: Sequence[str] | None = None,
    parameters: Mapping[str, object] | None = None,
    request_id: str = "",
) -> EncodedRequest:
    """Return a request with binary tensors. Raises Failure(INVALID) for values that a datatype cannot represent.

    Args:
        given: the inputs.
        binary_outputs: whether the reply has binary tensors.
        outputs: the outputs to return; None: all.
        parameters: further parameters of the request.
        request_id: the request's `id`; empty: none.
    """
    inputs, raws = [], []
    for spec, array in given:
        with about_input(spec["name"]):
            raws.append(encode(array, spec["datatype"]))
        tensor = {"name": spec["name"], "shape": list(array.shape), "datatype": spec["datatype"]}
        inputs.append({**tensor, "parameters": {"binary_data_size": len(raws[-1])}})
    document: dict[str, Any] = {"id": request_id} if request_id else {}
    document["inputs"] = inputs
    if outputs is not None:
        document["outputs"] = [{"name": name, "parameters": {"binary_data": binary_outputs}} for name in outputs]
    document["parameters"] = {"binary_data_output": binary_outputs, **(parameters or {})}
    header = json_of(document, "the request's parameters are")
    return EncodedRequest(b"".join([header, *raws]), len(header))


def random_request(metadata: Metadata, rows: int, random: np.random.Generator) -> EncodedRequest:
    """Return a request with `rows` rows of random values."""
    specs = metadata["inputs"]
    return encode_request(Given(spec, random_input(spec["datatype"], spec["shape"], rows, random)) for spec in specs)


def decode_reply(content: bytes | bytearray, header_bytes: str | None) -> DecodedReply:
    """Decode a reply. Raises Failure(INTERNAL) if it is malformed.

    Arrays share the memory of `content` where they are aligned there; those of a bytearray may be changed.
    `header_bytes` is the reply's Inference-Header-Content-Length; None if it has none.
    """
    view = memoryview(content)
    try:
        end = len(content) if header_bytes is None else int(header_bytes)
        document: dict[str, Any] = parse_json(view[:end])
        outputs = {}
        for tensor in document["outputs"]:
            bytes_ = (tensor.get("parameters") or {}).get("binary_data_size")
            if bytes_ is None:
                array = from_data(tensor["data"], tensor["datatype"], tensor["shape"])
            else:
                array = decode(view[end : end + bytes_], tensor["datatype"], tensor["shape"])
                end += bytes_
            outputs[tensor["name"]] = array if array.flags.aligned else array.copy()
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Failure(Code.INTERNAL, f"the server's reply is not an inference response: {error}") from error
    return DecodedReply(document, outputs)
