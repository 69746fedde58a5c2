"""openapi_examples: puts requests that a model accepts into the OpenAPI document, so that each can be tried. Pure.

manifest ─> ModelExample (a body for each form) ─> with_examples(document) ─> a document with values to send
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from millstream.gateway.http.openapi import EXAMPLE_FORM
from millstream.gateway.http.openapi_document import Document, operations
from millstream.gateway.tensors.examples import Sample, samples
from millstream.services.model.datatypes import BINARY_ONLY, BYTES, FLOATS
from millstream.services.model.manifest import Manifest, TrialInputs
from millstream.services.model.signature import Signature, TensorSpec, needed_inputs

#: elements of the inputs of an example; larger models have none, since it would fill the page
ELEMENTS_MAX = 4096

_SPECIAL = frozenset({"id", "parameters"})  # members of a generate request that are no inputs
_INTEGERS = frozenset({"INT32", "INT64"})
_TOKENS = frozenset({"input_ids", "attention_mask", "token_type_ids"})

#: a handwritten 2 as 8 x 8 pixels, from the held-out digits
_DIGIT_PIXELS = (
    *(0, 0, 7, 16, 14, 3, 0, 0, 0, 0, 9, 14, 11, 15, 0, 0, 0, 0, 1, 5, 0, 15, 5, 0, 0, 0, 0, 0, 0, 16, 5, 0),
    *(0, 0, 0, 0, 3, 16, 4, 0, 0, 0, 0, 1, 12, 14, 1, 0, 0, 0, 5, 12, 16, 16, 14, 1, 0, 0, 8, 16, 14, 10, 13, 3),
)
_DIGIT = ("pixels", "FP32", (1, 64))


class ModelExample(NamedTuple):
    """A model, and a body that it accepts, by form. Forms that cannot express its inputs are missing."""

    model: str
    version: int
    bodies: Mapping[str, Any]


class _Input(NamedTuple):
    """An input of an example. `row`: without dimension 0."""

    sample: Sample
    flat: list[Any]
    nested: Any
    row: Any


def model_example(model: str, version: int, signature: Signature, trial: TrialInputs | None) -> ModelExample:
    """Return an example for a version. It has no bodies if no inputs are known to run, or they are too long to show."""
    if trial is None or _element_count(signature, trial) > ELEMENTS_MAX:
        return ModelExample(model, version, {})
    inputs = [_input(sample) for sample in samples(signature, trial)]
    bodies: dict[str, Any] = {}
    if all(one.flat for one in inputs):  # without elements, nesting does not show the shape
        bodies = _row_bodies(inputs, batching=signature.batching)
    if all(one.flat and one.sample.name not in _SPECIAL for one in inputs):
        bodies["generate"] = {one.sample.name: one.row if signature.batching else one.nested for one in inputs}
    if not _is_binary_only(signature):
        bodies["v2"] = _v2_body(inputs, signature)
    if len(inputs) == 1 and signature.batching and inputs[0].flat:
        bodies["csv"] = ",".join(_cell(element) for element in inputs[0].flat)
    entry = _embedded(signature)
    if entry is not None:
        bodies["embeddings"] = {"model": model, "input": entry}
    return ModelExample(model, version, bodies)


def _input(sample: Sample) -> _Input:
    if sample[:3] == _DIGIT:
        pixels = list(_DIGIT_PIXELS)
        return _Input(sample, pixels, [pixels], pixels)
    return _Input(sample, sample.flat.value(), sample.nested.value(), sample.row.value())


def _v2_body(inputs: Sequence[_Input], signature: Signature) -> dict[str, Any]:
    body: dict[str, Any] = {
        "inputs": [
            {"name": sample.name, "shape": list(sample.shape), "datatype": sample.datatype, "data": flat}
            for sample, flat, *_ in inputs
        ]
    }
    binary = any(spec.datatype in BINARY_ONLY for spec in signature.outputs)  # they have no JSON form
    return body | ({"parameters": {"binary_data_output": True}} if binary else {})


def _row_bodies(inputs: Sequence[_Input], *, batching: bool) -> dict[str, Any]:
    """Return the bodies in row form; in column form for a version without rows."""
    single = len(inputs) == 1
    if not batching:
        whole = inputs[0].nested if single else {one.sample.name: one.nested for one in inputs}
        return {"instances": {"inputs": whole}, "rows": whole}
    named = {one.sample.name: one.row for one in inputs}
    row = inputs[0].row if single else named
    return {"instances": {"instances": [row]}, "examples": {"examples": [named]}, "rows": row}


def _element_count(signature: Signature, trial: TrialInputs) -> int:
    return sum(max(1, sample.elements) for sample in samples(signature, trial))


def _is_binary_only(signature: Signature) -> bool:
    """Return whether v2 has no JSON form for an input."""
    return any(spec.datatype in BINARY_ONLY for spec in needed_inputs(signature))


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
DIGITS = model_example(
    "digits",
    1,
    Signature(inputs=(TensorSpec(name="pixels", datatype="FP32", shape=(-1, 64)),), outputs=(), batching=True),
    TrialInputs(size=1, fill=0),
)
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


def choose(candidates: Sequence[Manifest], *, name_target: bool) -> Examples:
    """Return examples of the first version that has a v2 body, else a body of any form, else of any version.

    Without a version, the examples are the digits example.

    Args:
        candidates: the versions that answer.
        name_target: as in Examples.
    """
    shown = [
        manifest
        for manifest in candidates
        if manifest.trial is not None and _element_count(manifest.signature, manifest.trial) <= ELEMENTS_MAX
    ]
    as_json = (manifest for manifest in shown if not _is_binary_only(manifest.signature))
    best = next((manifest for some in (as_json, shown, candidates) for manifest in some), None)
    embedding = next((manifest for manifest in shown if _embedded(manifest.answered) is not None), None)
    return Examples(
        DIGITS if best is None else _example_of(best),
        None if embedding is None else _example_of(embedding),
        name_target=name_target,
    )


def _example_of(manifest: Manifest) -> ModelExample:
    return model_example(manifest.model, manifest.version, manifest.answered, manifest.trial)


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
