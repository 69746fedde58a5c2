"""Inference requests and replies as the command line makes and reads them. Pure.

arrays by input name -> JSON header + raw tensors …  reply -> arrays by output name
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
    """A request's body; `header_bytes`: length of the JSON before its tensors, None for a body of JSON alone."""

    body: bytes
    header_bytes: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply: its JSON, and its outputs by name in the reply's order."""

    document: dict[str, Any]
    outputs: dict[str, Array]


def call_of(metadata: dict[str, Any], arrays: Mapping[str, Array], *, binary_outputs: bool = True) -> EncodedRequest:
    """A request with binary tensors. Raises Failure(INVALID) if the arrays are not what the model takes.

    Which inputs may be left out only the endpoint knows; it says so if one is missing.
    """
    specs = {spec["name"]: spec for spec in metadata["inputs"]}
    wrong = sorted(arrays.keys() - specs.keys())
    if wrong:
        raise invalid(f"input {wrong[0]} is not one of the model's; {metadata['name']} takes {', '.join(specs)}")
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


def made_up_call(metadata: dict[str, Any], rows: int, random: np.random.Generator) -> EncodedRequest:
    """A request with `rows` rows of random values."""
    arrays = {spec["name"]: random_input(spec["datatype"], spec["shape"], rows, random) for spec in metadata["inputs"]}
    return call_of(metadata, arrays)


def answer_of(content: bytes, header_bytes: str | None) -> Answer:
    """Read a reply. `header_bytes`: its Inference-Header-Content-Length, None where it has none.

    Raises Failure(INTERNAL) if it is not one.
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
        raise Failure(Code.INTERNAL, f"the endpoint's answer is not an inference response: {error}") from error
    return Answer(document, outputs)
