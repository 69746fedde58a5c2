"""openapi_examples: puts requests that a model accepts into the OpenAPI document, so that each can be tried. Pure.

manifest ─> ModelExample (a body for each form) ─> with_examples(document) ─> a document with values to send
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from millstream.gateway.protocols.http.openapi import EXAMPLE_FORM
from millstream.gateway.protocols.http.openapi_document import Document, operations
from millstream.services.model.datatypes import BINARY_ONLY, BYTES, FLOATS
from millstream.services.model.signature import Signature, TensorSpec, needed_inputs

#: elements of the inputs of an example; larger models have none, since it would fill the page
ELEMENTS_MAX = 4096

_INTEGERS = frozenset({"INT32", "INT64"})
_TOKENS = frozenset({"input_ids", "attention_mask", "token_type_ids"})

#: a handwritten 2 as 8 x 8 pixels, from the held-out digits
_DIGIT_PIXELS = (
    *(0, 0, 7, 16, 14, 3, 0, 0, 0, 0, 9, 14, 11, 15, 0, 0, 0, 0, 1, 5, 0, 15, 5, 0, 0, 0, 0, 0, 0, 16, 5, 0),
    *(0, 0, 0, 0, 3, 16, 4, 0, 0, 0, 0, 1, 12, 14, 1, 0, 0, 0, 5, 12, 16, 16, 14, 1, 0, 0, 8, 16, 14, 10, 13, 3),
)
_DIGIT = TensorSpec(name="pixels", datatype="FP32", shape=(-1, 64))


class ModelExample(NamedTuple):
    """A model, and a body that it accepts, by form. Forms that cannot express its inputs are missing."""

    model: str
    version: int
    bodies: Mapping[str, Any]


def model_example(model: str, version: int, signature: Signature) -> ModelExample:
    """Return an example for a version. It has no bodies if the inputs have too many elements to show."""
    if _element_count(signature) > ELEMENTS_MAX:
        return ModelExample(model, version, {})
    specs = needed_inputs(signature)
    shapes = {spec.name: _shape(spec, signature) for spec in specs}
    flat = {spec.name: _elements(spec, shapes[spec.name]) for spec in specs}
    values = {name: _nested(elements, shapes[name]) for name, elements in flat.items()}
    bodies: dict[str, Any] = _row_bodies(values, batching=signature.batching)
    bodies["generate"] = {name: value[0] if signature.batching else value for name, value in values.items()}
    if not _is_binary_only(signature):
        bodies["v2"] = {
            "inputs": [
                {"name": spec.name, "shape": shapes[spec.name], "datatype": spec.datatype, "data": flat[spec.name]}
                for spec in specs
            ]
        }
    if len(specs) == 1 and signature.batching and flat[specs[0].name]:
        bodies["csv"] = ",".join(_cell(element) for element in flat[specs[0].name])
    entry = _embedded(signature)
    if entry is not None:
        bodies["embeddings"] = {"model": model, "input": entry}
    return ModelExample(model, version, bodies)


def _row_bodies(values: dict[str, Any], *, batching: bool) -> dict[str, Any]:
    """Return the bodies in row form; in column form for a version without rows."""
    only = next(iter(values.values())) if len(values) == 1 else None
    if not batching:
        whole = values if only is None else only
        return {"instances": {"inputs": whole}, "rows": whole}
    row = {name: value[0] for name, value in values.items()}
    instances = [row] if only is None else only
    return {
        "instances": {"instances": instances},
        "examples": {"examples": [row]},
        "rows": row if only is None else only[0],
    }


def _element_count(signature: Signature) -> int:
    return sum(math.prod(_shape(spec, signature)) for spec in needed_inputs(signature))


def _is_binary_only(signature: Signature) -> bool:
    """Return whether v2 has no JSON form for an input."""
    return any(spec.datatype in BINARY_ONLY for spec in needed_inputs(signature))


def _shape(spec: TensorSpec, signature: Signature) -> list[int]:
    """Return the smallest shape that the spec allows: one row, and 1 for variable dimensions."""
    return [1 if dim == -1 or (at == 0 and signature.batching) else dim for at, dim in enumerate(spec.shape)]


def _elements(spec: TensorSpec, shape: list[int]) -> list[Any]:
    """Return the elements: zeros, which are valid indices and lengths everywhere; for digits, a digit."""
    if spec == _DIGIT:
        return list(_DIGIT_PIXELS)
    zero: Any = 0
    if spec.datatype == BYTES:
        zero = "0"
    elif spec.datatype == "BOOL":
        zero = False
    elif spec.datatype in FLOATS:
        zero = 0.0
    return [zero] * math.prod(shape)


def _nested(elements: list[Any], shape: list[int]) -> Any:
    if not shape:
        return elements[0]
    if len(shape) == 1:
        return elements
    inner = math.prod(shape[1:])
    return [_nested(elements[at * inner : (at + 1) * inner], shape[1:]) for at in range(shape[0])]


def _cell(element: Any) -> str:
    return str(element).lower() if isinstance(element, bool) else str(element)


def _embedded(signature: Signature) -> Any:
    """Return an entry to embed; None for a model that gives no embeddings (protocols/openai/embedder.py)."""
    outputs = [spec for spec in signature.outputs if spec.datatype in FLOATS and len(spec.shape) in {2, 3}]
    if len(signature.outputs) != 1 or not outputs:
        return None
    inputs = signature.inputs
    if len(inputs) == 1 and inputs[0].datatype == BYTES and len(inputs[0].shape) in {1, 2}:
        return ["a mill", "a stream"]
    if all(spec.name in _TOKENS and spec.datatype in _INTEGERS and len(spec.shape) == 2 for spec in inputs):
        return [[0]]
    return None


#: the example of a document without a model: the digits example
DIGITS = model_example("digits", 1, Signature(inputs=(_DIGIT,), outputs=(), batching=True))
_EMBEDDINGS = {"model": "minilm", "input": ["a mill", "a stream"]}


class Examples(NamedTuple):
    """The models that a document names in its examples.

    Args:
        model: the model of all forms but `embeddings`.
        embeddings: the model of that form; None: no model gives embeddings.
        name_target: whether calls that name no model need a header that does.
    """

    model: ModelExample = DIGITS
    embeddings: ModelExample | None = None
    name_target: bool = False


def choose(candidates: Sequence[tuple[str, int, Signature]], *, name_target: bool) -> Examples:
    """Return examples of the first version that has a v2 body, else a body of any form, else of any version.

    Without a version, the examples are the digits example.

    Args:
        candidates: name, version and signature of the versions that answer.
        name_target: as in Examples.
    """
    shown = [candidate for candidate in candidates if _element_count(candidate[2]) <= ELEMENTS_MAX]
    as_json = (candidate for candidate in shown if not _is_binary_only(candidate[2]))
    best = next((one for some in (as_json, shown, candidates) for one in some), None)
    embedding = next((candidate for candidate in shown if _embedded(candidate[2]) is not None), None)
    return Examples(
        DIGITS if best is None else model_example(*best),
        None if embedding is None else model_example(*embedding),
        name_target=name_target,
    )


def with_examples(document: Document, examples: Examples) -> Document:
    """Return a copy of `document` whose inference operations can be sent as they are.

    Args:
        document: a document of openapi_document.complete.
        examples: the models to name.
    """
    example, embeddings, name_target = examples
    bodies = {
        **example.bodies,
        "embeddings": _EMBEDDINGS if embeddings is None else embeddings.bodies["embeddings"],
    }
    paths: dict[str, Any] = {path: dict(methods) for path, methods in document["paths"].items()}
    for path, method, operation in operations(document):
        contents = operation.get("requestBody", {}).get("content", {})
        is_inference = any(EXAMPLE_FORM in body for body in contents.values())
        filled = dict(operation)
        if is_inference:
            filled["requestBody"] = {
                **operation["requestBody"],
                "content": {kind: _filled(body, bodies) for kind, body in contents.items()},
            }
        if (is_inference or method == "get") and "parameters" in operation:  # a click must not delete anything
            filled["parameters"] = [
                _filled_parameter(parameter, example, name_target=name_target) for parameter in operation["parameters"]
            ]
        paths[path][method] = filled
    return {**document, "paths": paths}


def _filled(body: dict[str, Any], bodies: Mapping[str, Any]) -> dict[str, Any]:
    form = body.get(EXAMPLE_FORM)
    if form is None:
        return body
    filled = {name: value for name, value in body.items() if name != EXAMPLE_FORM}
    return filled | ({"example": bodies[form]} if form in bodies else {})


def _filled_parameter(parameter: dict[str, Any], example: ModelExample, *, name_target: bool) -> dict[str, Any]:
    name = parameter["name"]
    if parameter["in"] == "path":
        values = {"model": example.model, "name": example.model, "endpoint": example.model}
        values |= {"version": str(example.version), "label": "serving"}
        if parameter["schema"].get("type") == "integer":
            return {**parameter, "example": example.version}
        return {**parameter, "example": values[name]} if name in values else parameter
    if name_target and name == "X-Amzn-SageMaker-Target-Model":
        return {**parameter, "example": example.model}
    return parameter
