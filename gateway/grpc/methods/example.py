"""Adds the signature and a request that works to the status message of a request that does not fit. Pure.

A status has no members but its message, so both are in it, as far as they are short.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from millstream.gateway.grpc.codec.decode import FIELDS
from millstream.gateway.tensors.examples import Filled, Sample, Target, json_text, python_text, raw_element, samples
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.services.model.datatypes import BINARY_ONLY, BYTES
from millstream.services.model.signature import TensorSpec

#: longer examples are left out: clients take about 8 KiB of headers, the status message included
EXAMPLE_CHARACTERS_MAX = 1024
SIGNATURE_CHARACTERS_MAX = 512
MESSAGE_BYTES_MAX = 2048


def advice_text(plans: InputPlans) -> str:
    """Return the end of a status message: the inputs, and a request that works as ModelInferRequest in JSON."""
    specs = plans.signature.inputs
    inputs = ", ".join(f"{spec.name} {spec.datatype}{_dims(spec)}" for spec in specs)
    if len(inputs) > SIGNATURE_CHARACTERS_MAX:
        inputs = f"{len(specs)}, which ModelMetadata lists"
    if plans.trial is None:
        return f"; inputs: {inputs}"
    target = Target(plans.model, plans.signature, samples(plans.signature, plans.trial))
    return f"; inputs: {inputs}{_example(infer_document(target))}"


def with_advice(message: str, advice: str) -> str:
    """Return `message` with `advice` at its end, or without it where that would be too long for a status message."""
    complete = f"{message.removesuffix('.')}{advice}"
    return complete if len(complete.encode("utf-8", "backslashreplace")) <= MESSAGE_BYTES_MAX else message


def _example(document: dict[str, Any] | None) -> str:
    text = "" if document is None else json_text(document, EXAMPLE_CHARACTERS_MAX)
    if text:
        return f"; a request that works: {text}"
    python = "" if document is None else python_text(document)
    return f"; a request that works, in Python: {python}" if 0 < len(python) <= EXAMPLE_CHARACTERS_MAX else ""


def infer_document(target: Target) -> dict[str, Any] | None:
    """Return a ModelInferRequest in protobuf's JSON form. If an input has no typed contents, all are raw.

    None if raw contents would be longer than EXAMPLE_CHARACTERS_MAX.
    """
    if not any(sample.datatype in BINARY_ONLY for sample in target.samples):
        return _request(target, [_tensor(sample) | {"contents": _contents(sample)} for sample in target.samples])
    if sum(sample.elements for sample in target.samples) > EXAMPLE_CHARACTERS_MAX:
        return None
    raws = [base64.b64encode(raw_element(sample) * sample.elements).decode() for sample in target.samples]
    return _request(target, [_tensor(sample) for sample in target.samples]) | {"raw_input_contents": raws}


def _request(target: Target, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"model_name": target.model, "inputs": inputs}


def _tensor(sample: Sample) -> dict[str, Any]:
    return {"name": sample.name, "datatype": sample.datatype, "shape": list(sample.shape)}


def _contents(sample: Sample) -> Mapping[str, Filled]:
    if sample.datatype == BYTES:
        return {"bytes_contents": sample.flat._replace(element=base64.b64encode(sample.element.encode()).decode())}
    return {FIELDS[sample.datatype][0]: sample.flat}


def _dims(spec: TensorSpec) -> str:
    return "[" + ",".join(map(str, spec.shape)) + "]"
