"""How routes describe their bodies for the OpenAPI document.

A route names schemas by reference, so that no schema is computed at start. `Adapter.schemas` lists the types behind
the references; gateway/http/openapi_document.py computes them when the document is first asked for.
"""

from __future__ import annotations

from typing import Any

_COMPONENTS = "#/components/schemas/"
JSON = "application/json"
OCTETS = "application/octet-stream"

#: key of a request body's content that is inference: the form of its example
EXAMPLE_FORM = "x-example-form"
#: key of a response that is an error: its body is the path's error format
ERROR = "x-error"
#: key of a tag: whether its section of the OpenAPI page is open at first
OPEN = "x-open"

#: a handwritten 2 as 8 x 8 pixels, from the held-out digits
_PIXELS = [
    *(0, 0, 7, 16, 14, 3, 0, 0, 0, 0, 9, 14, 11, 15, 0, 0, 0, 0, 1, 5, 0, 15, 5, 0, 0, 0, 0, 0, 0, 16, 5, 0),
    *(0, 0, 0, 0, 3, 16, 4, 0, 0, 0, 0, 1, 12, 14, 1, 0, 0, 0, 5, 12, 16, 16, 14, 1, 0, 0, 8, 16, 14, 10, 13, 3),
]
#: form -> a request body that the digits example accepts
EXAMPLES: dict[str, Any] = {
    "v2": {"inputs": [{"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": _PIXELS}]},
    "instances": {"instances": [_PIXELS]},
    "examples": {"examples": [{"pixels": _PIXELS}]},
    "rows": _PIXELS,
    "generate": {"pixels": _PIXELS},
    "csv": ",".join(map(str, _PIXELS)),
    "embeddings": {"model": "minilm", "input": ["a mill", "a stream"]},
}
#: name of a path's parameter -> what the digits example fills in
PATH_EXAMPLES: dict[str, Any] = {"model": "digits", "name": "digits", "endpoint": "digits", "label": "serving"}
EXAMPLE_VERSION = 1

BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
TEXT: dict[str, Any] = {"schema": {"type": "string"}}


def ref(kind: Any) -> dict[str, str]:
    """Return the reference to the schema of `kind`, a TypedDict or a pydantic model that an adapter lists."""
    return {"$ref": f"{_COMPONENTS}{kind.__name__}"}


def list_of(kind: Any) -> dict[str, Any]:
    """Return the schema of a list of `kind`."""
    return {"type": "array", "items": ref(kind)}


def content(schema: dict[str, Any], *, form: str | None = None, example: Any = None) -> dict[str, Any]:
    """Return the description of a body of one media type.

    Args:
        schema: its JSON schema.
        form: of inference, the form of the example of EXAMPLES; None: `example` is the example.
        example: an example; None: there is none.
    """
    described: dict[str, Any] = {"schema": schema}
    if form is not None:
        described |= {EXAMPLE_FORM: form, "example": EXAMPLES[form]}
    if example is not None:
        described["example"] = example
    return described


def request_body(by_media_type: dict[str, Any], *, required: bool = True, description: str = "") -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads a body in one of these media types."""
    body: dict[str, Any] = {"required": required, "content": by_media_type}
    if description:
        body["description"] = description
    return {"requestBody": body}


def json_body(kind: Any, *, required: bool = True, form: str | None = None, example: Any = None) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads a `kind` as JSON."""
    return request_body({JSON: content(ref(kind), form=form, example=example)}, required=required)


def reply(
    schema: dict[str, Any], description: str, *, example: Any = None, status: int = 200
) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that answers with JSON of this schema."""
    return {status: {"description": description, "content": {JSON: content(schema, example=example)}}}


def header_parameter(name: str, description: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the description of an optional request header that a route reads by itself."""
    return {"name": name, "in": "header", "required": False, "description": description} | {
        "schema": schema or {"type": "string"}
    }


def header_ref(name: str) -> dict[str, str]:
    """Return the reference to a response header of openapi_document.HEADERS."""
    return {"$ref": f"#/components/headers/{name}"}
