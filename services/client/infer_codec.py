"""Encodes inference requests and decodes replies for the client. Pure.

arrays by input name -> JSON header + raw tensors; reply -> arrays by output name
Source: Open Inference Protocol v2, inference and binary tensor data extension.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millstream.services.client.documents import Metadata
from millstream.services.client.replies import parse_json
from millstream.services.client.tensors import Array, decode, encode, fit, from_data, random_input
from millstream.services.errors import Code, Failure, invalid


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
    metadata: Metadata,
    arrays: Mapping[str, Array],
    *,
    binary_outputs: bool = True,
    outputs: Sequence[str] | None = None,
    parameters: Mapping[str, object] | None = None,
    request_id: str = "",
) -> EncodedRequest:
    """Return a request with binary tensors. Raises Failure(INVALID) if the arrays do not fit the model's inputs.

    Missing inputs are not checked here: only the server knows which ones are optional.

    Args:
        metadata: the model's signature.
        arrays: by input name; values must be representable in the input's datatype.
        binary_outputs: whether the reply has binary tensors.
        outputs: the outputs to return; None: all.
        parameters: further parameters of the request.
        request_id: the request's `id`; empty: none.
    """
    specs = {spec["name"]: spec for spec in metadata["inputs"]}
    unknown = sorted(arrays.keys() - specs.keys(), key=str)
    if unknown:
        raise invalid(f"the model has no input {unknown[0]}; the inputs of {metadata['name']} are {', '.join(specs)}")
    inputs, raws = [], []
    for name, spec in specs.items():
        if name not in arrays:
            continue
        array = fit(arrays[name], spec["shape"], name)
        raws.append(encode(array, spec["datatype"]))
        tensor_parameters = {"binary_data_size": len(raws[-1])}
        tensor = {"name": name, "shape": list(array.shape), "datatype": spec["datatype"]}
        inputs.append({**tensor, "parameters": tensor_parameters})
    document: dict[str, Any] = {"id": request_id} if request_id else {}
    document["inputs"] = inputs
    if outputs is not None:
        document["outputs"] = [{"name": name, "parameters": {"binary_data": binary_outputs}} for name in outputs]
    document["parameters"] = {"binary_data_output": binary_outputs, **(parameters or {})}
    try:
        header = json.dumps(document).encode()
    except (TypeError, ValueError) as error:
        raise invalid(f"the request's parameters are not JSON: {error}") from error
    return EncodedRequest(b"".join([header, *raws]), len(header))


def random_request(metadata: Metadata, rows: int, random: np.random.Generator) -> EncodedRequest:
    """Return a request with `rows` rows of random values."""
    arrays = {spec["name"]: random_input(spec["datatype"], spec["shape"], rows, random) for spec in metadata["inputs"]}
    return encode_request(metadata, arrays)


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
