"""Procedures of API keys and the audit log. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import quote

from millstream.services.client.call import Call, Steps, send
from millstream.services.client.replies import document_of

_PATH = "/admin/v1/keys"
_JSON = {"Content-Type": "application/json"}


def manage(action: str, name: str | None, document: Mapping[str, Any], *, forget: bool) -> Steps[dict[str, Any]]:
    """Create, list, edit, rotate or revoke keys; return the key, or all keys."""
    one = f"{_PATH}/{quote(name or '', safe='')}"
    content = json.dumps(document).encode()
    calls = {
        "create": Call("POST", _PATH, headers=_JSON, content=content),
        "list": Call("GET", _PATH, repeatable=True),
        "edit": Call("PATCH", one, headers=_JSON, content=content),
        "rotate": Call("POST", f"{one}/rotate", headers=_JSON, content=content),
        "revoke": Call("DELETE", one, query={"forget": "true"} if forget else {}, repeatable=True),
    }
    return document_of((yield from send(calls[action])), "keys" if action == "list" else "id")


def audit(limit: int, **wanted: str | float | None) -> Steps[list[dict[str, Any]]]:
    """Return the newest entries of the audit log, the newest last. `wanted`: key, model, since, until."""
    query = {name: str(value) for name, value in {"limit": limit, **wanted}.items() if value is not None}
    call = Call("GET", "/admin/v1/audit", query=query, repeatable=True)
    return cast("list[dict[str, Any]]", document_of((yield from send(call)), "entries")["entries"])
