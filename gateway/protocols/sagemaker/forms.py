"""Which form a container of SageMaker reads and writes, beside those of v2. Pure. The forms are in tensors/forms.py."""

from __future__ import annotations

from millstream.gateway.tensors.forms import CSV, JSON, NPY


def chosen(accept: str | None) -> str | None:
    """The first form in an Accept header that can be given; None: none of them can."""
    for part in (accept or "*/*").split(","):
        wanted = part.partition(";")[0].strip().lower()
        if wanted in {JSON, CSV, NPY}:
            return wanted
        if wanted in {"*/*", "application/*", ""}:
            return JSON
        if wanted == "text/*":
            return CSV
    return None


def is_v2(document: object) -> bool:
    """Whether a JSON body is a request of v2: its inputs say their names and shapes, if there are any."""
    inputs = document.get("inputs") if isinstance(document, dict) else None
    return type(inputs) is list and all(
        type(one) is dict and "name" in one and ("datatype" in one or "shape" in one) for one in inputs
    )
