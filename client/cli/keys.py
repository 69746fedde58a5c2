"""`millstream keys`: creates, edits, rotates and revokes API keys; `millstream audit`: what was changed, by whom."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

import typer

from millstream.client.cli.failures import usage_of, wrong_usage
from millstream.client.cli.options import Endpoint, Json, Key, open_client
from millstream.client.cli.terminal import emit, escape, results, show_rows, size
from millstream.services.process.machine_share import parse_size

_PATH = "/admin/v1/keys"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class KeyAction(StrEnum):
    """What to do with keys."""

    CREATE = "create"
    LIST = "list"
    EDIT = "edit"
    ROTATE = "rotate"
    REVOKE = "revoke"


def keys(
    context: typer.Context,
    action: Annotated[KeyAction, typer.Argument(help="What to do.", show_default=False)],
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of the key, or its id.", show_default=False)
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCOPE",
            help="infer:GLOB, models:read:GLOB, models:write:GLOB, models:code, models:network, metrics, "
            "shared-memory, admin; repeatable.",
        ),
    ] = None,
    rate: Annotated[float | None, typer.Option(metavar="N", help="Most calls a second, over all gateways.")] = None,
    rows: Annotated[float | None, typer.Option(metavar="N", help="Most rows of inference requests a second.")] = None,
    concurrency: Annotated[int | None, typer.Option(metavar="N", help="Most calls at the same time.")] = None,
    compute: Annotated[
        float | None, typer.Option(metavar="S", help="Most seconds a minute that runs may take, as measured.")
    ] = None,
    models: Annotated[int | None, typer.Option(metavar="N", help="Most models that it owns.")] = None,
    disk: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most disk of the models that it owns, as 20GiB or 500MiB.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most memory of the models that it owns, in all workers together."),
    ] = None,
    uploads: Annotated[int | None, typer.Option(metavar="N", help="Most uploads at the same time.")] = None,
    priority: Annotated[
        int | None, typer.Option(metavar="N", help="Highest priority of its requests; 1 is the highest.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Life of the key from now on, as 90d, 12h, 30m, 45s.")
    ] = None,
    grace: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long `rotate` keeps the secret before; default 24h.")
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="With `revoke`: remove the document of a revoked, expired or damaged key.")
    ] = False,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Create, list, edit, rotate or revoke API keys. A new key is printed once; the server keeps only a hash of it.

    As soon as there is a key, every call needs one. `edit` changes what is given, and the key keeps its secret; 0 takes
    a limit away, `--expires never` the end. `rotate` gives a key a new secret, and changes what is given; the secret
    before is accepted for a while. A revoked key is refused by all gateways within a second.
    """
    if action is not KeyAction.LIST and not name:
        raise wrong_usage(f"keys {action}: name the key")
    limits = {"requests_per_s": rate, "rows_per_s": rows, "concurrency": concurrency, "compute_s_per_minute": compute}
    limits |= {"models": models, "disk_bytes": None if disk is None else _bytes(disk), "uploads": uploads}
    limits |= {"memory_bytes": None if memory is None else _bytes(memory)}
    document = _asked(action, scope, limits, priority, expires)
    _check_options(action, document, grace=grace, forget=forget)
    if action is KeyAction.CREATE:
        document["name"] = name
    if grace is not None:
        document["grace_s"] = _seconds("--grace", grace)
    with open_client(context, endpoint, key) as client:
        found = client.keys(action.value, name, document, forget=forget)
    if json_output:
        emit(found)
    elif action is KeyAction.LIST:
        _show_all(found)
    elif "key" in found:
        _show_new(found)
    elif action is KeyAction.EDIT:
        _show_all({"keys": [found], "damaged": []})
    else:
        results().print(f"key {escape(found['name'])} ({found['id']}) is {'forgotten' if forget else found['state']}")


def _check_options(action: KeyAction, given: Mapping[str, Any], *, grace: str | None, forget: bool) -> None:
    """Raise wrong usage if an option would be ignored, or one is missing."""
    if action is KeyAction.CREATE and "scopes" not in given:  # it could do nothing
        raise wrong_usage("keys create: give at least one --scope, such as --scope infer:digits")
    if action is KeyAction.EDIT and not given:
        raise wrong_usage("keys edit: give what to change, such as --rate 50 or --expires 90d")
    if action in {KeyAction.LIST, KeyAction.REVOKE} and given:
        raise wrong_usage(f"keys {action} changes neither scopes, limits, priority nor expiry: keys edit does")
    if grace is not None and action is not KeyAction.ROTATE:
        raise wrong_usage("--grace is for keys rotate")
    if forget and action is not KeyAction.REVOKE:
        raise wrong_usage("--forget is for keys revoke")


def _asked(
    action: KeyAction,
    scopes: list[str] | None,
    limits: Mapping[str, float | None],
    priority: int | None,
    expires: str | None,
) -> dict[str, Any]:
    """Return what is given. Of a key that exists, 0 and `never` take away what was."""
    exists = action is not KeyAction.CREATE
    given: dict[str, Any] = {"scopes": scopes} if scopes else {}
    if changed := {limit: value for limit, value in limits.items() if value is not None}:
        given["limits"] = {limit: None if exists and not value else value for limit, value in changed.items()}
    if priority is not None:
        given["priority_max"] = None if exists and not priority else priority
    if expires is not None:
        given["expires_in_s"] = None if exists and expires == "never" else _seconds("--expires", expires)
    return given


def audit(
    context: typer.Context,
    lines: Annotated[int, typer.Option("-n", "--lines", metavar="N", min=1, max=1000, help="Most entries.")] = 20,
    of: Annotated[str | None, typer.Option("--of", metavar="NAME", help="Of the key with this name or id.")] = None,
    model: Annotated[str | None, typer.Option(metavar="GLOB", help="About models with such names.")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Of the last 90d, 12h, 30m or 45s.")] = None,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Show what was changed through the admin API: when, by whom, from where, and how it ended. The newest is last."""
    with open_client(context, endpoint, key) as client:
        first = None if since is None else time.time() - _seconds("--since", since)  # noqa: TID251 - instants for people
        entries = client.audit(lines, key=of, model=model, since=first)
    if json_output:
        emit({"entries": entries})
        return
    cells = [
        (
            _time(entry.get("at")),
            escape(str(entry.get("by", ""))),
            escape(str(entry.get("address", ""))),
            escape("; ".join(entry.get("changes") or ()) or str(entry.get("target", ""))),
            str(entry.get("outcome", "")),
        )
        for entry in entries
    ]
    show_rows(results(), ("TIME", "BY", "FROM", "WHAT", "OUTCOME"), cells)


def _show_new(found: Mapping[str, Any]) -> None:
    console = results()
    console.print(f"key {escape(found['name'])} ({found['id']}); it is shown only now:")
    print(found["key"])
    console.print("clients of AWS sign with")
    print(f"  aws_access_key_id={found['aws_access_key_id']}")
    print(f"  aws_secret_access_key={found['aws_secret_access_key']}")


def _show_all(found: Mapping[str, Any]) -> None:
    rows = [
        (
            escape(one["name"]),
            one["id"],
            one["state"],
            escape(" ".join(one["scopes"])),
            escape(", ".join(_limit(one, limit, value) for limit, value in one["limits"].items() if value is not None)),
            "-" if one["expires_at"] is None else _time(one["expires_at"]),
        )
        for one in found["keys"]
    ]
    show_rows(results(), ("NAME", "ID", "STATE", "SCOPES", "LIMITS", "EXPIRES"), rows)
    for damaged in found["damaged"]:
        results().print(
            f"the document of key {escape(damaged)} is damaged: the key is refused. "
            f"`millstream keys revoke {escape(damaged)} --forget` removes the document"
        )


def _limit(key: Mapping[str, Any], name: str, value: float) -> str:
    if name == "memory_bytes":
        return f"{name} {size(key.get('memory_taken_bytes', 0))} of {size(value)}"
    return f"{name} {size(value) if name == 'disk_bytes' else f'{value:g}'}"


def _bytes(text: str) -> int:
    """Return the bytes of a size such as 20GiB. Raises UsageFailure."""
    with usage_of():
        return parse_size(text)


def _seconds(option: str, text: str) -> float:
    """Return the seconds of a time such as 90d. Raises UsageFailure."""
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.replace(".", "", 1).isdecimal():
        raise wrong_usage(f"{option}: {text[:20]!r} is no time: write 90d, 12h, 30m or 45s")
    return float(number) * _UNITS[unit]


def _time(instant: Any) -> str:
    return datetime.fromtimestamp(float(instant or 0)).astimezone().strftime("%Y-%m-%d %H:%M:%S")
