"""forms: selects the form of a request and of its reply among those of tensors/forms.py and v2. Pure."""

from __future__ import annotations

from millstream.gateway.tensors.forms import CSV, JSON, JSON_LINES, NPY, media_type


def accepted_form(accept: str | None) -> str | None:
    """Return the first supported form in an Accept header; None: none is supported."""
    for part in (accept or "*/*").split(","):
        wanted = media_type(part)
        if wanted in {JSON, JSON_LINES, CSV, NPY}:
            return wanted
        if wanted in {"*/*", "application/*"}:
            return JSON
        if wanted == "text/*":
            return CSV
    return None


def is_v2(document: object) -> bool:
    """Whether a JSON body is a request of v2: all its inputs, if any, have a name, and a datatype or a shape."""
    inputs = document.get("inputs") if isinstance(document, dict) else None
    return type(inputs) is list and all(
        type(one) is dict and "name" in one and ("datatype" in one or "shape" in one) for one in inputs
    )
