"""`millstream restart`: new processes for old ones, one after the other, while requests go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from millstream.services.cli.commands.up import Home
from millstream.services.cli.options import Json, load_settings
from millstream.services.errors import Code, Failure


class What(StrEnum):
    """Which processes."""

    ALL = "all"
    GATEWAYS = "gateways"
    WORKERS = "workers"


def restart(
    what: Annotated[What, typer.Argument(metavar="[gateways|workers|all]", help="Which processes.")] = What.ALL,
    home: Home = None,
    json_output: Json = False,
) -> None:
    """Replace the processes of a running `millstream up`, failing no request.

    One after the other: a new one starts, loads and warms up what the old one serves, takes over, and the old one
    answers what it has and ends. If a new one does not become ready, the old one goes on serving and the rest is left
    alone. The settings stay those of `millstream up`; so does Redis. SIGHUP to `millstream up` does the same.
    """
    from millstream.services.cli.terminal import duration, emit, escape, results, table, working

    began = time.monotonic()
    with working("restarting", quiet=json_output) as show:
        replaced = asyncio.run(_restart(load_settings(home=home).home, what, show))
    seconds = round(time.monotonic() - began, 3)
    if json_output:
        emit({"replaced": replaced, "seconds": seconds})
        return
    console = results()
    rows = table("PROCESS", "PID", "NEW PID", "TOOK", right=("PID", "NEW PID", "TOOK"))
    for one in replaced:
        before = str(one["pid_before"] or "-")
        rows.add_row(escape(one["process"]), before, str(one["pid"]), duration(one["seconds"]))
    console.print(rows)
    processes = "1 process" if len(replaced) == 1 else f"{len(replaced)} processes"
    console.print(f"\nrestarted {processes} in {duration(seconds)}")


async def _restart(home: Path, what: What, show: Callable[[str], None]) -> list[dict[str, Any]]:
    from millstream.services.supervisor.control import send_request
    from millstream.services.supervisor.lock import read_holder

    home = home.expanduser().resolve()
    control = read_holder(home / "run").get("control")
    nothing = Failure(
        Code.UNAVAILABLE, f"nothing runs in {home}: start it with `millstream up`, or name its folder with --home"
    )
    if not isinstance(control, str):
        raise nothing
    replaced = []
    try:
        async for event in send_request(Path(control), {"restart": what.value}):
            if event["event"] == "starting":
                show(f"{event['process']} ({event['replaced'] + 1} of {event['of']})")
            elif event["event"] == "replaced":
                replaced.append({name: value for name, value in event.items() if name != "event"})
    except OSError as error:
        raise nothing from error
    return replaced
