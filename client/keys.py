"""Procedures of API keys and the audit log. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import quote

from millstream.client.call import Call, Steps, json_call, send
from millstream.client.replies import document_of
from millstream.services.errors import invalid

_PATH = "/admin/v1/keys"


def manage(action: str, name: str | None, document: Mapping[str, Any], *, forget: bool) -> Steps[dict[str, Any]]:
    """Create, list, edit, rotate or revoke keys; return the key, or all keys."""
    one = f"{_PATH}/{quote(name or '', safe='')}"
    calls = {
        "create": json_call("POST", _PATH, document),
        "list": Call("GET", _PATH, repeatable=True),
        "edit": json_call("PATCH", one, document),
        "rotate": json_call("POST", f"{one}/rotate", document),
        "revoke": Call("DELETE", one, query={"forget": "true"} if forget else {}, repeatable=True),
    }
    if action not in calls:
        raise invalid(f"{action!r} is no action on keys: use {', '.join(calls)}")
    return document_of((yield from send(calls[action])), "keys" if action == "list" else "id")


def audit(limit: int, **wanted: str | float | None) -> Steps[list[dict[str, Any]]]:
    """Return the newest entries of the audit log, the newest last. `wanted`: key, model, since, until."""
    query = {name: str(value) for name, value in {"limit": limit, **wanted}.items() if value is not None}
    call = Call("GET", "/admin/v1/audit", query=query, repeatable=True)
    return cast("list[dict[str, Any]]", document_of((yield from send(call)), "entries")["entries"])
