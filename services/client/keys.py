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
    """Create, list, rotate or revoke keys; return the key, or all keys."""
    one = f"{_PATH}/{quote(name or '', safe='')}"
    content = json.dumps({field: value for field, value in document.items() if value is not None}).encode()
    calls = {
        "create": Call("POST", _PATH, headers=_JSON, content=content),
        "list": Call("GET", _PATH, repeatable=True),
        "rotate": Call("POST", f"{one}/rotate", headers=_JSON, content=content),
        "revoke": Call("DELETE", one, query={"forget": "true"} if forget else {}, repeatable=True),
    }
    return document_of((yield from send(calls[action])), "keys" if action == "list" else "id")


def audit(limit: int) -> Steps[list[dict[str, Any]]]:
    """Return the newest entries of the audit log, the newest last."""
    call = Call("GET", "/admin/v1/audit", query={"limit": str(limit)}, repeatable=True)
    return cast("list[dict[str, Any]]", document_of((yield from send(call)), "entries")["entries"])
