"""`millstream placement`: shows which worker holds which version, and why."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.services.cli.options import Endpoint, Json, Key, ModelName, ServerAddress, server_address
from millstream.services.cli.terminal import (
    GAP_COLUMNS,
    age,
    bar,
    duration,
    emit,
    escape,
    results,
    show_detail,
    show_rows,
    size,
    state,
)

if TYPE_CHECKING:
    from rich.console import Console

    from millstream.services.client.documents import PlacedInstance, PlacedVersion, PlacedWorker, Placement

WATCH_S = 2.0  # between two pictures
#: Narrower terminals do not show how long the load of an instance took.
WIDE_COLUMNS = 100
BAR_COLUMNS, BAR_TERMINAL_COLUMNS = 24, 72
WHY_COLUMNS_MIN = 12
STANDBY_SHOWN_MAX = 50


def placement(
    context: typer.Context,
    name: ModelName = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again every 2 s, until Ctrl-C.")] = False,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Show which worker holds which version, how much memory it takes, and why it is there.

    Versions on standby are loaded at their first call. WHY says who asked for the load: a call, the settings of the
    model (`millstream configure`), or the controller.
    """
    server = server_address(context, endpoint, key)
    console = results()
    while True:
        found = _placement(server, name)
        if watch and console.is_terminal:
            console.clear()
        if json_output:
            emit(found)
        else:
            _show(console, found, name)
        if not watch:
            return
        time.sleep(WATCH_S)


def _placement(server: ServerAddress, name: str | None) -> Placement:
    from millstream.services.client.client import Client

    with Client(server, retries=0) as client:
        return client.placement(name)


def _show(console: Console, found: Placement, name: str | None) -> None:
    leader = found["leader"]
    controller = escape(leader["name"]) if leader else "[yellow]none[/]: versions are loaded at calls only"
    show_detail(console, "controller   ", controller)
    if name is not None:
        for version in found["models"]:
            _show_version(console, version)
    if not found["workers"]:
        console.print("[yellow]no worker is running[/]")
    for worker in found["workers"]:
        _show_worker(console, worker)
    _show_standby(console, [version for version in found["models"] if version["standby"]])
    if any(version["refusals"] for version in found["models"]):
        console.print()
    for version in found["models"]:
        for refusal in version["refusals"]:
            again = f" (again in {duration(refusal['retry_after_s'])})"
            text = f"{escape(version['model'])} {version['version']} in {_short(refusal['worker'])}: "
            show_detail(console, "refused      ", text + escape(refusal["reason"]) + again, style="red")


def _show_version(console: Console, version: PlacedVersion) -> None:
    settings = version["settings"]
    limits = [f"at least {settings['instances_min']}"] if settings["instances_min"] else []
    limits += [f"at most {settings['instances_max']} in a pool"] if settings["instances_max"] else []
    parts = [f"pools {escape(', '.join(version['pools']))}"]
    parts += [f"instances: {', '.join(limits)}"] if limits else []
    parts += [f"unloaded after {settings['idle_s']:g} s without a call"] if settings["idle_s"] else []
    parts += ["pinned"] if settings["pin"] else []
    label = f"{escape(version['model'])} {version['version']}"
    show_detail(console, "version      ", f"{label}: {state(version['state'])}; {'; '.join(parts)}")
    if version["reason"]:
        show_detail(console, "             ", escape(version["reason"]))


def _show_worker(console: Console, worker: PlacedWorker) -> None:
    budget = worker["budget_bytes"]
    used = size(worker["used_bytes"])
    if budget and console.width < BAR_TERMINAL_COLUMNS:
        memory = f"{used} of {size(budget)}"
    elif budget:
        memory = f"{bar(worker['used_bytes'] / budget, BAR_COLUMNS)}  {used} of {size(budget)}"
    else:
        memory = f"{used}, no limit"
    draining = ", [yellow]draining[/]" if worker["draining"] else ""
    held = worker["instances_total"]
    count = "1 version" if held == 1 else f"{held} versions"
    console.print(f"\n[bold]{_short(worker['id'])}[/]  {memory}, {count}{draining}")
    if worker["instances"]:
        _show_instances(console, worker["instances"])


def _show_instances(console: Console, instances: Sequence[PlacedInstance]) -> None:
    wide = console.width >= WIDE_COLUMNS
    columns = ["MODEL", "STATE", "SIZE", *(["LOAD"] if wide else []), "USED", "WHY"]
    rows = []
    for one in instances:
        load = [duration(one["load_s"]) if one["load_s"] else "-"] if wide else []
        rows.append(
            [
                escape(f"{one['model']} {one['version']}"),
                state(one["state"]),
                size(one["size_bytes"] or None),
                *load,
                _used(one),
            ]
        )
    widths = [max(len(title), *(len(_plain(row[at])) for row in rows)) for at, title in enumerate(columns[:-1])]
    room = console.width - sum(widths) - GAP_COLUMNS * len(widths)
    for row, one in zip(rows, instances, strict=True):
        why = _why(one)
        # Without room for it, rows become blocks of lines, where all of it is shown.
        row.append(escape(_cut(why, room) if room >= WHY_COLUMNS_MIN else why))
    show_rows(console, columns, rows, right=("SIZE", "LOAD"))


def _plain(cell: str) -> str:
    from rich.text import Text

    return Text.from_markup(cell).plain


def _used(one: PlacedInstance) -> str:
    if one["in_use"]:
        return "now"
    return "never" if one["last_used_age_s"] is None else age(one["last_used_age_s"])


def _why(one: PlacedInstance) -> str:
    reasons = ["pinned"] if one["pinned"] else []
    return "; ".join([*reasons, *filter(None, (one["reason"], one["why"]))]) or "-"


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: columns - 1]}…"


def _show_standby(console: Console, versions: Sequence[PlacedVersion]) -> None:
    if not versions:
        return
    names = [f"{version['model']} {version['version']}" for version in versions[:STANDBY_SHOWN_MAX]]
    more = f" and {len(versions) - len(names)} more" if len(versions) > len(names) else ""
    console.print()
    show_detail(console, "on standby   ", escape(", ".join(names)) + more)


def _short(worker: str) -> str:
    """Return the name of a worker, without the id of its start."""
    return escape(worker.rpartition("-")[0] or worker)
