"""Procedures of races: ask for one, see it, wait for its end, cancel it, undo its verdict, upload samples. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from millstream.client.call import Call, Pause, Steps, json_call, listed, send
from millstream.client.documents import Race
from millstream.client.models import admin_path
from millstream.client.replies import document_of

WAIT_PAUSE_S = 0.5  # between two looks at a race
_BINARY = {"Content-Type": "application/octet-stream"}
RUNNING = frozenset({"waiting", "queued", "running"})


def _path(model: str, version: int) -> str:
    return f"{admin_path(model, version)}/race"


def _pool(pool: str | None) -> dict[str, str]:
    return {} if pool is None else {"pool": pool}


def begin(
    model: str,
    version: int,
    targets: Sequence[str],
    pool: str | None,
    gate: Mapping[str, float | str] | None,
    *,
    accept_random_samples: bool,
) -> Steps[Race]:
    document: dict[str, object] = {"targets": listed(targets), "pool": pool, "gate": dict(gate or {})}
    given: dict[str, object] = {name: value for name, value in document.items() if value}
    given |= {"accept_random_samples": True} if accept_random_samples else {}
    call = json_call("POST", _path(model, version), given, repeatable=True)
    return cast("Race", document_of((yield from send(call)), "state", "rows"))


def race(model: str, version: int, pool: str | None) -> Steps[Race]:
    call = Call("GET", _path(model, version), query=_pool(pool), repeatable=True)
    return cast("Race", document_of((yield from send(call)), "state", "rows"))


def wait(model: str, version: int, pool: str | None) -> Steps[Race]:
    while True:
        document = yield from race(model, version, pool)
        if document["state"] not in RUNNING:
            return document
        yield Pause(WAIT_PAUSE_S)


def cancel(model: str, version: int, pool: str | None) -> Steps[Race]:
    call = Call("DELETE", _path(model, version), query=_pool(pool), repeatable=True)
    return cast("Race", document_of((yield from send(call)), "state", "rows"))


def undo(model: str, version: int, pool: str | None) -> Steps[Race]:
    call = Call("POST", f"{_path(model, version)}/undo", query=_pool(pool), repeatable=True)
    return cast("Race", document_of((yield from send(call)), "state", "rows"))


def put_samples(model: str, version: int, content: bytes) -> Steps[dict[str, list[int]]]:
    call = Call("PUT", f"{_path(model, version)}/samples", headers=_BINARY, content=content, repeatable=True)
    document = document_of((yield from send(call)), "arrays")
    return cast("dict[str, list[int]]", document["arrays"])
