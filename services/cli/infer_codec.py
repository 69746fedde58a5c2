"""Encodes inference requests and decodes replies for the command line. Pure.

arrays by input name -> JSON header + raw tensors; reply -> arrays by output name
Source: Open Inference Protocol v2, inference and binary tensor data extension.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from millstream.services.cli.tensors import Array, decode, encode, fit, from_data, random_input
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
    metadata: dict[str, Any], arrays: Mapping[str, Array], *, binary_outputs: bool = True
) -> EncodedRequest:
    """Return a request with binary tensors. Raises Failure(INVALID) if the arrays do not fit the model's inputs.

    Missing inputs are not checked here: only the server knows which ones are optional.
    """
    specs = {spec["name"]: spec for spec in metadata["inputs"]}
    unknown = sorted(arrays.keys() - specs.keys())
    if unknown:
        raise invalid(f"the model has no input {unknown[0]}; the inputs of {metadata['name']} are {', '.join(specs)}")
    inputs, raws = [], []
    for name, spec in specs.items():
        if name not in arrays:
            continue
        array = fit(arrays[name], spec["shape"], name)
        raws.append(encode(array, spec["datatype"]))
        parameters = {"binary_data_size": len(raws[-1])}
        tensor = {"name": name, "shape": list(array.shape), "datatype": spec["datatype"], "parameters": parameters}
        inputs.append(tensor)
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": binary_outputs}}).encode()
    return EncodedRequest(b"".join([header, *raws]), len(header))


def random_request(metadata: dict[str, Any], rows: int, random: np.random.Generator) -> EncodedRequest:
    """Return a request with `rows` rows of random values."""
    arrays = {spec["name"]: random_input(spec["datatype"], spec["shape"], rows, random) for spec in metadata["inputs"]}
    return encode_request(metadata, arrays)


def decode_reply(content: bytes, header_bytes: str | None) -> DecodedReply:
    """Decode a reply. Raises Failure(INTERNAL) if it is malformed.

    `header_bytes` is its Inference-Header-Content-Length; None if it has none.
    """
    try:
        end = len(content) if header_bytes is None else int(header_bytes)
        document: dict[str, Any] = json.loads(content[:end])
        outputs = {}
        for tensor in document["outputs"]:
            bytes_ = (tensor.get("parameters") or {}).get("binary_data_size")
            if bytes_ is None:
                array = from_data(tensor["data"], tensor["datatype"], tensor["shape"])
            else:
                array = decode(content[end : end + bytes_], tensor["datatype"], tensor["shape"])
                end += bytes_
            outputs[tensor["name"]] = array
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Failure(Code.INTERNAL, f"the server's reply is not an inference response: {error}") from error
    return DecodedReply(document, outputs)
