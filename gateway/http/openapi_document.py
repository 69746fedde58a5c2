"""Completes the OpenAPI document that FastAPI makes of the routes. Pure.

routes ─> FastAPI ─> who may call ─> examples ─> headers ─> errors in the path's format ─> schemas ─> document
Schemas, error responses and headers are components, which operations refer to by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic import TypeAdapter

from millstream.gateway.http.errors import ErrorFormats
from millstream.gateway.http.openapi import ERROR, EXAMPLE_FORM, EXAMPLE_VERSION, JSON, PATH_EXAMPLES, header_ref, ref

Document = dict[str, Any]

#: response headers, by name
HEADERS: dict[str, dict[str, Any]] = {
    "Content-Encoding": {"description": "gzip or deflate, if the request accepts it.", "schema": {"type": "string"}},
    "Inference-Header-Content-Length": {
        "description": "Bytes of the JSON part, if binary tensors follow it.",
        "schema": {"type": "integer", "minimum": 0},
    },
    "Location": {"description": "The path of the new version.", "schema": {"type": "string"}},
    "Retry-After": {
        "description": "Seconds until another attempt makes sense.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "WWW-Authenticate": {"description": "How to send the key.", "schema": {"type": "string"}},
    "X-Amzn-ErrorType": {"description": "The kind of the error, for boto3.", "schema": {"type": "string"}},
    "X-Amzn-Invoked-Production-Variant": {"description": "The version that answered.", "schema": {"type": "string"}},
    "X-Request-Id": {
        "description": "The id that the request was sent with, or a new one; logs and traces have it.",
        "schema": {"type": "string", "maxLength": 128},
    },
    "Server-Timing": {
        "description": "Milliseconds in the gateway's lane, in the queue and of the run, if the server is set to say.",
        "schema": {"type": "string"},
    },
    "Millstream-Form": {
        "description": "The compiled form that answered, with version and pool; absent: the version's own file did.",
        "schema": {"type": "string"},
    },
    "endpoint-load-metrics": {
        "description": "ORCA's load report, for requests with endpoint-load-metrics-format: json, text or bin.",
        "schema": {"type": "string"},
    },
}
_EVERY_REPLY = ("X-Request-Id",)
_INFERENCE = ("Server-Timing", "Millstream-Form", "endpoint-load-metrics")
#: status of an error -> headers of its replies
_HEADERS_OF_STATUS = {"401": ("WWW-Authenticate",), "429": ("Retry-After",), "503": ("Retry-After",)}

_PARAMETERS = {
    "endpoint": "Name of the model.",
    "label": "`serving` or `stable`: the version that answers.",
    "model": "Name of the model.",
    "name": "Name of the model.",
    "region": "Name of the region.",
    "repository": "Any name.",
    "version": "Number of the version.",
}
_OF_STATUS_422 = frozenset({"HTTPValidationError", "ValidationError"})  # a parameter that does not fit is answered 400
_METHODS = frozenset({"get", "put", "post", "delete", "options", "patch"})


def operations(document: Document) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield path, method and operation of a document, in order."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method in _METHODS:
                yield path, method, operation


def complete(
    document: Document, schemas: Sequence[Any], formats: ErrorFormats, is_open: Callable[[str], bool]
) -> Document:
    """Complete the document that FastAPI made, and return it.

    Args:
        document: FastAPI's document. It is changed.
        schemas: types that operations refer to.
        formats: finds the error format of a path.
        is_open: whether calls of a path need no key in this configuration.
    """
    components = document.setdefault("components", {})
    responses: dict[str, Any] = {}
    errors: dict[str, Any] = {}
    for path, method, operation in operations(document):
        error_format = formats.of(path)
        _secure(operation, path, is_open)
        inference = _is_inference(operation)
        _describe_parameters(operation, filled=inference or method == "get")  # a click must not delete anything
        operation["responses"].pop("422", None)
        for status, response in operation["responses"].items():
            added = (*_EVERY_REPLY, *(_INFERENCE if status == "200" and inference else ()))
            response["headers"] = response.get("headers", {}) | {name: header_ref(name) for name in added}
            if response.get(ERROR):
                errors[error_format.document.__name__] = error_format.document
                name = f"{error_format.document.__name__}{status}"
                responses[name] = _error(response["description"], status, error_format.document, error_format.headers)
                operation["responses"][status] = {"$ref": f"#/components/responses/{name}"}
        operation["responses"] = dict(sorted(operation["responses"].items()))
    made = components.get("schemas", {}) | _computed([*schemas, *errors.values()])
    components["schemas"] = {name: made[name] for name in sorted(made) if name not in _OF_STATUS_422}
    components["responses"] = dict(sorted(responses.items()))
    components["headers"] = HEADERS
    tidied: Document = _tidied(document)
    return tidied


def _secure(operation: dict[str, Any], path: str, is_open: Callable[[str], bool]) -> None:
    """Remove what is not in force: the key, and the errors of callers without it."""
    if "security" not in operation:
        return
    if is_open(path):
        operation["responses"].pop("401", None)
        del operation["security"]


def _is_inference(operation: dict[str, Any]) -> bool:
    contents = operation.get("requestBody", {}).get("content", {})
    return any(EXAMPLE_FORM in body for body in contents.values())


def _describe_parameters(operation: dict[str, Any], *, filled: bool) -> None:
    """Describe the parameters of the path; `filled`: with the digits example, so that the operation can be tried."""
    for parameter in operation.get("parameters", ()):
        name = parameter["name"]
        if parameter["in"] != "path" or name not in _PARAMETERS:
            continue
        parameter.setdefault("description", _PARAMETERS[name])
        if filled and name == "version":
            number = parameter["schema"].get("type") == "integer"
            parameter["example"] = EXAMPLE_VERSION if number else str(EXAMPLE_VERSION)
        elif filled and name in PATH_EXAMPLES:
            parameter["example"] = PATH_EXAMPLES[name]


def _error(description: str, status: str, document: Any, headers: Sequence[str]) -> dict[str, Any]:
    names = sorted({*_EVERY_REPLY, *_HEADERS_OF_STATUS.get(status, ()), *headers})
    return {
        "description": description,
        "headers": {name: header_ref(name) for name in names},
        "content": {JSON: {"schema": ref(document)}},
    }


def _computed(kinds: Sequence[Any]) -> dict[str, Any]:
    """Return the JSON schemas of `kinds` and of the types within them, by name."""
    adapters = [(kind.__name__, "validation", TypeAdapter(kind)) for kind in dict.fromkeys(kinds)]
    _, definitions = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    return dict(definitions["$defs"])


def _tidied(value: Any, *, named: bool = False) -> Any:
    """Return `value` without what releases of FastAPI and pydantic write differently, and without our own marks.

    These are titles, which repeat names, `additionalProperties` where it is true, and what is derived from a handler
    beside a reference. `named`: the keys of `value` are names.
    """
    if isinstance(value, list):
        return [_tidied(item) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("$ref"), str):
        return {"$ref": value["$ref"]}
    return {
        name: item if name in {"example", "info"} else _tidied(item, named=name in {"properties", "schemas"})
        for name, item in value.items()
        if named or not _is_default(name, item)
    }


def _is_default(name: str, item: Any) -> bool:
    titled = name == "title" and isinstance(item, str)
    return titled or (name == "additionalProperties" and item is True) or name == EXAMPLE_FORM
