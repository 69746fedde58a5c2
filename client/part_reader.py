"""Answers in parts: a JSON object of inputs out, a Prediction for each event in. Pure, as `inference`.

inputs ─> the call of generate_stream ─> lines of the reply ─> PartReader ─> Prediction, Prediction, …
Source: Triton, "Generate Extension"; WHATWG HTML, "Server-sent events".
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from millstream.client.call import Call, Steps, json_call
from millstream.client.documents import Metadata
from millstream.client.inference import Options, Prediction, Signatures, as_text, known_signature
from millstream.client.inputs import given_inputs
from millstream.client.models import v2_path
from millstream.client.tensors import from_data
from millstream.services.errors import Code, Failure

_DATA = "data:"


class PartReader:
    """Reads the lines of one reply."""

    def __init__(self, signature: Metadata) -> None:
        self._outputs = {spec["name"]: spec for spec in signature["outputs"]}

    def read(self, line: str) -> Prediction | None:
        """Return the part in a line; None: it has none. Raises Failure: an error that ends the answer."""
        if not line.startswith(_DATA):
            return None
        try:
            document = json.loads(line[len(_DATA) :])
            if "error" in document:
                raise Failure(Code.MODEL, str(document["error"]))
            outputs = {
                name: as_text(_array(spec, document[name])) for name, spec in self._outputs.items() if name in document
            }
            number = str(document.get("model_version", ""))
            return Prediction(
                outputs, str(document.get("model_name", "")), int(number) if number.isdigit() else None, ""
            )
        except (ValueError, TypeError, LookupError) as error:
            raise Failure(
                Code.INTERNAL, f"the server's reply has an event that is no part of an answer: {error}"
            ) from error


def _array(spec: Any, value: Any) -> np.ndarray[Any, Any]:
    """Return an output, which is flat in an event, in the shape of the signature if that says it."""
    flat = value if isinstance(value, list) else [value]
    shape = [int(dim) for dim in spec["shape"]]
    unknown = sum(dim < 0 for dim in shape)
    array = from_data(flat, spec["datatype"], [len(flat)])
    if unknown > 1 or (not unknown and int(np.prod(shape)) != len(flat)):
        return array
    return array.reshape(shape)


def stream(name: str, inputs: Any, options: Options, signatures: Signatures) -> Steps[tuple[Call, PartReader]]:
    """Return the call for an answer in parts, and what reads its reply. Raises Failure(INVALID)."""
    signature = yield from known_signature(name, options.version, signatures)
    document: dict[str, Any] = {
        given.spec["name"]: _plain(as_text(given.array)) for given in given_inputs(signature, inputs)
    }
    if options.request_id:
        document["id"] = options.request_id
    if options.parameters:
        document["parameters"] = dict(options.parameters)
    return json_call("POST", f"{v2_path(name, options.version)}/generate_stream", document), PartReader(signature)


def _plain(array: np.ndarray[Any, Any]) -> Any:
    return array.item() if array.size == 1 else array.tolist()
