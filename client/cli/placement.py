"""`millstream placement`: shows which worker holds which version, and why."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.client.cli.options import Endpoint, Json, Key, ModelName, open_client
from millstream.client.cli.terminal import (
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

    from millstream.client.documents import (
        InstancePlacement,
        LoadPrediction,
        Placement,
        VersionPlacement,
        WorkerPlacement,
    )

WATCH_S = 2.0  # between two pictures
#: Narrower terminals do not show how long the load of an instance took.
WIDE_COLUMNS = 100
BAR_COLUMNS, BAR_TERMINAL_COLUMNS = 24, 72
WHY_COLUMNS_MIN = 12
#: A picture of --watch has at least this many rows of each table, also in a low terminal.
WATCH_ROWS_MIN = 3
#: Lines of a picture that are no rows: the controller, and of each table its title, head, remark and an empty line.
WATCH_LINES_OTHER, WATCH_LINES_TABLE = 3, 4
#: what stands before a number that is not measured
PREDICTED = "~"


def placement(
    context: typer.Context,
    name: ModelName = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again every 2 s, until Ctrl-C.")] = False,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Show which worker holds which version, how much memory it takes, and why it is there.

    USED is how long ago its last call was. WHY says who asked for the load: a call, the settings of the model
    (`millstream configure`), or the controller.

    Versions on standby are loaded at their first call; SIZE and LOAD are what that takes, ~ if it is predicted because
    they were never loaded. With --watch, tables are cut to the height of the terminal, the latest used first.
    """
    console = results()
    while True:
        with open_client(context, endpoint, key) as client:
            found = client.placement(name)
        picture = watch and console.is_terminal and not json_output
        if picture:
            console.clear()
        if json_output:
            emit(found)
        else:
            _show(console, found, name, _rows_max(console.height, found) if picture else None)
        if not watch:
            return
        if not picture:
            sys.stdout.flush()
        time.sleep(WATCH_S)


def _rows_max(height: int, found: Placement) -> int:
    """Return how many rows each table may have, so that all of them fit a terminal of this height."""
    tables = len(found["workers"]) + any(version["standby"] for version in found["models"])
    return max(WATCH_ROWS_MIN, (height - WATCH_LINES_OTHER) // max(1, tables) - WATCH_LINES_TABLE)


def _show(console: Console, found: Placement, name: str | None, rows_max: int | None) -> None:
    """Print a placement. `rows_max`: of each table; None: all."""
    leader = found["leader"]
    controller = escape(leader["name"]) if leader else "[yellow]none[/]: versions are loaded at calls only"
    show_detail(console, "controller   ", controller)
    if name is not None:
        for version in found["models"]:
            _show_version(console, version)
    if not found["workers"]:
        console.print("[yellow]no worker is running[/]")
    for worker in found["workers"]:
        _show_worker(console, worker, name, rows_max)
    if not found["models"]:
        console.print(
            "\nno model is served yet: millstream push NAME FILE" if name is None else "\nit serves no version"
        )
    _show_standby(console, [version for version in found["models"] if version["standby"]], rows_max)
    _show_not_loaded(console, found["models"])


def _show_not_loaded(console: Console, versions: Sequence[VersionPlacement]) -> None:
    """Print why versions are not loaded: loads that failed or were refused, and versions without a worker."""
    lines: list[tuple[str, str, str]] = []
    for version in versions:
        label = escape(f"{version['model']} {version['version']}")
        lines += [
            ("failed       ", "red", f"{label} in {_short(one['worker'])}: {escape(one['reason'])}")
            for one in version["failed"]
        ]
        for one in version["refusals"]:
            again = f" (again in {duration(one['retry_after_s'])})"
            text = f"{label} in {_short(one['worker'])}: {escape(one['reason'])}{again}"
            lines.append(("refused      ", "red", text))
        if not (version["holders"] or version["failed"] or version["standby"]):
            pools = escape(" or ".join(version["pools"]))
            why = "" if version["load"] else f": pool {pools} has no worker"
            lines.append(("not loaded   ", "yellow", f"{label} ({version['state']}){why}"))
    if lines:
        console.print()
    for kind, colour, text in lines:
        show_detail(console, kind, text, style=colour)


def _show_version(console: Console, version: VersionPlacement) -> None:
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
    if missing := version.get("missing"):
        show_detail(console, "missing      ", escape(missing), style="yellow")


def _show_worker(console: Console, worker: WorkerPlacement, name: str | None, rows_max: int | None) -> None:
    budget = worker["budget_bytes"]
    used = size(worker["used_bytes"])
    if budget and console.width < BAR_TERMINAL_COLUMNS:
        memory = f"{used} of {size(budget)}"
    elif budget:
        memory = f"{bar(worker['used_bytes'] / budget, BAR_COLUMNS)}  {used} of {size(budget)}"
    else:
        memory = f"{used}, no limit"
    if worker["device_budget_bytes"]:
        memory += f", device {size(worker['device_used_bytes'])} of {size(worker['device_budget_bytes'])}"
    draining = ", [yellow]draining[/]" if worker["draining"] else ""
    held = worker["instances_total"]
    count = "1 version" if held == 1 else f"{held} versions"
    show_detail(console, "", "")
    show_detail(console, "", f"[bold]{_short(worker['id'])}[/]  {memory}, {count}{draining}")
    instances = [one for one in worker["instances"] if one["state"] != "failed"]
    shown = instances
    if rows_max is not None and len(instances) > rows_max:
        shown = sorted(instances, key=_idle_s)[:rows_max]
    if shown:
        _show_instances(console, shown)
        _show_rest(console, len(instances) - len(shown))
    elif name is not None:
        console.print(f"[dim]it does not have {escape(name)}[/]")


def _idle_s(one: InstancePlacement) -> float:
    """Return for how many seconds an instance has not been used; infinity if it never was."""
    if one["in_use"]:
        return 0.0
    return math.inf if one["last_used_age_s"] is None else one["last_used_age_s"]


def _show_rest(console: Console, count: int) -> None:
    if count:
        console.print(f"[dim]and {count} more[/]")


def _show_instances(console: Console, instances: Sequence[InstancePlacement]) -> None:
    wide = console.width >= WIDE_COLUMNS
    columns = ["MODEL", "STATE", "SIZE", *(["LOAD"] if wide else []), "USED", "WHY"]
    rows = []
    for one in instances:
        load = [duration(one["load_s"]) if one["load_s"] else "-"] if wide else []
        rows.append(
            [
                escape(f"{one['model']} {one['version']}"),
                state(one["state"]),
                size(one["size_bytes"] if one["load_s"] or one["size_bytes"] else None),
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


def _used(one: InstancePlacement) -> str:
    if one["in_use"]:
        return "now"
    return "never" if one["last_used_age_s"] is None else age(one["last_used_age_s"])


def _why(one: InstancePlacement) -> str:
    reasons = ["pinned"] if one["pinned"] else []
    return "; ".join([*reasons, *filter(None, (one["reason"], one["why"]))]) or "-"


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: columns - 1]}…"


def _show_standby(console: Console, versions: Sequence[VersionPlacement], rows_max: int | None) -> None:
    if not versions:
        return
    shown = versions[:rows_max]
    count = "1 version" if len(versions) == 1 else f"{len(versions)} versions"
    console.print()
    show_detail(console, "", f"[bold]on standby[/]  {count}, loaded at the first call")
    rows = [[escape(f"{one['model']} {one['version']}"), *_load(one["load"])] for one in shown]
    show_rows(console, ["MODEL", "SIZE", "LOAD"], rows, right=("SIZE", "LOAD"))
    _show_rest(console, len(versions) - len(shown))


def _load(load: LoadPrediction | None) -> tuple[str, str]:
    """Return the size and the time of a load."""
    if load is None:
        return "-", "-"
    mark = "" if load["measured"] else PREDICTED
    return f"{mark}{size(load['size_bytes'])}", f"{mark}{duration(load['load_s'])}" if load["load_s"] else "-"


def _short(worker: str) -> str:
    """Return the name of a worker, without the id of its start."""
    return escape(worker.rpartition("-")[0] or worker)
