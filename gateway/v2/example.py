"""The form of v2 REST, of generate and of binary tensors for the examples in error documents. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from millstream.gateway.tensors.elements import raw_from_strings
from millstream.gateway.tensors.examples import Body, Sample, Target
from millstream.services.model.datatypes import BINARY_ONLY, BYTES, NUMPY

_SPECIAL = frozenset({"id", "parameters"})  # members of a generate request that are no inputs


def infer_body(target: Target) -> Body:
    """Return a v2 request. If an input has no JSON form (FP16, BF16), all inputs are binary."""
    if any(sample.datatype in BINARY_ONLY for sample in target.samples):
        return _binary_body(target)
    return Body({"inputs": [_tensor(sample) | {"data": sample.flat} for sample in target.samples], **_outputs(target)})


def generate_body(target: Target) -> Body | None:
    """Return a generate request; None if its members cannot name the inputs, or their nesting does not show shapes."""
    names = {sample.name for sample in target.samples}
    if names & _SPECIAL or any(0 in sample.shape for sample in target.samples):
        return None
    return Body({sample.name: sample.nested for sample in target.samples})


def raw_element(sample: Sample) -> bytes:
    """Return one element of a sample in raw form."""
    if sample.datatype == BYTES:
        return raw_from_strings([sample.element.encode()])
    if sample.datatype == "BF16":
        return (0x3F80 if sample.element else 0).to_bytes(2, "little")
    return np.array(sample.element, NUMPY[sample.datatype]).tobytes()


def _binary_body(target: Target) -> Body:
    document = {
        "inputs": [
            _tensor(sample) | {"parameters": {"binary_data_size": sample.elements * len(raw_element(sample))}}
            for sample in target.samples
        ],
        **_outputs(target),
    }
    head = orjson.dumps(document)
    tensors = " + ".join(f"{raw_element(sample)!r} * {sample.elements}" for sample in target.samples)
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return Body(document, f"requests.post(url, data={head!r} + {tensors}, headers={headers!r})")


def _outputs(target: Target) -> dict[str, Any]:
    """Return the parameter that asks for binary outputs, if an output has no JSON form."""
    binary = any(spec.datatype in BINARY_ONLY for spec in target.signature.outputs)
    return {"parameters": {"binary_data_output": True}} if binary else {}


def _tensor(sample: Sample) -> dict[str, Any]:
    return {"name": sample.name, "datatype": sample.datatype, "shape": list(sample.shape)}
