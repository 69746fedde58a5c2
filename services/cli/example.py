"""Makes a request from a model's metadata, for `predict --example`: one row, the same values each time. Pure.

the server's example, if it has one; else
signature -> arrays -> a v2 body in JSON that a person can read and send again; binary where JSON has no form for it
"""

from __future__ import annotations

import json
import math
import shlex
from typing import Any, NamedTuple

import numpy as np

from millstream.client.documents import Metadata, Usage
from millstream.client.inference import EncodedRequest, encode_request
from millstream.client.inputs import Given
from millstream.client.tensors import VARIABLE_SIZE, Array, random_input
from millstream.services.errors import invalid
from millstream.services.model.datatypes import BINARY_ONLY, BYTES

#: Larger examples are sent as binary tensors, and not shown as JSON.
JSON_ELEMENTS_MAX = 1000
#: A longer body is not shown with a call to copy.
BODY_CHARACTERS_MAX = 400
#: A signature may name any size: more than this is not made up.
ELEMENTS_MAX = 1 << 28


class Example(NamedTuple):
    """A request and its arrays by input name; `document` is its JSON, None if it has binary tensors."""

    request: EncodedRequest
    arrays: dict[str, Array]
    document: dict[str, Any] | None


def example_of(metadata: Metadata, *, binary_outputs: bool) -> Example:
    """Return an example for a model; `binary_outputs`: the reply may have binary tensors. Raises Failure(INVALID)."""
    usage = metadata.get("parameters", {}).get("usage")
    if usage is not None and usage["example"] is not None:
        return Example(EncodedRequest(json.dumps(usage["example"]).encode(), None), {}, usage["example"])
    elements = sum(_elements(spec["shape"]) for spec in metadata["inputs"])
    if elements > ELEMENTS_MAX:
        raise invalid(f"an example for {metadata['name']} would have {elements:,} values: send one of your own")
    random = np.random.default_rng(0)
    arrays = {}
    for spec in metadata["inputs"]:
        values = np.asarray(random_input(spec["datatype"], spec["shape"], 1, random))
        arrays[spec["name"]] = np.round(values, 3) if values.dtype.kind == "f" else values
    binary = any(spec["datatype"] in BINARY_ONLY for spec in (*metadata["inputs"], *metadata["outputs"]))
    if binary or elements > JSON_ELEMENTS_MAX:
        given = [Given(spec, arrays[spec["name"]]) for spec in metadata["inputs"]]
        return Example(encode_request(given, binary_outputs=binary_outputs or binary), arrays, None)
    inputs = [
        {
            "name": spec["name"],
            "shape": list(arrays[spec["name"]].shape),
            "datatype": spec["datatype"],
            "data": _data(arrays[spec["name"]], spec["datatype"]),
        }
        for spec in metadata["inputs"]
    ]
    document = {"inputs": inputs}
    return Example(EncodedRequest(json.dumps(document).encode(), None), arrays, document)


def calls_of(url: str, name: str, usage: Usage | None) -> list[str]:
    """Return commands that call a model, to be copied: with what a person has, and over HTTP.

    Args:
        url: of the server.
        name: the model's.
        usage: how it wants to be called; None: the server does not say it.
    """
    kind = usage["kind"] if usage is not None else "tensors"
    own = {"text": "--text 'some text'", "columns": "--input table.csv"}
    calls = [f"millstream predict {name} {own.get(kind, '--example')}"]
    example = usage["example"] if usage is not None else None
    body = shlex.quote(json.dumps(example, ensure_ascii=True, separators=(",", ":"))) if example is not None else ""
    if body and len(body) <= BODY_CHARACTERS_MAX:
        calls.append(f"curl -s {url}/v2/models/{name}/infer -d {body}")
    return calls


def _elements(shape: list[int]) -> int:
    rows, *sizes = [VARIABLE_SIZE if size < 0 else size for size in shape] or [1]
    return (1 if shape and shape[0] < 0 else rows) * math.prod(sizes)


def _data(array: Array, datatype: str) -> list[Any]:
    if datatype == BYTES:
        return [element.decode() for element in array.ravel()]
    if datatype == "BOOL":
        return [bool(element) for element in array.ravel()]
    if array.dtype.kind == "f":
        # As written: the float32 nearest to 0.637 has more digits as a float64.
        return [round(element, 3) for element in array.ravel().tolist()]
    values: list[Any] = array.ravel().tolist()
    return values
