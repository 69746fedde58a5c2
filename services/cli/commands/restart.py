"""`millstream restart`: rolling restart of a running `millstream up`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from millstream.client.cli.options import Json, local_home
from millstream.services.cli.commands.up import Home
from millstream.services.errors import Code, Failure


class What(StrEnum):
    """The processes to restart."""

    ALL = "all"
    GATEWAYS = "gateways"
    WORKERS = "workers"


def restart(
    context: typer.Context,
    what: Annotated[What, typer.Argument(metavar="gateways|workers|all", help="Processes to replace.")] = What.ALL,
    home: Home = None,
    json_output: Json = False,
) -> None:
    """Replace the processes of a running `millstream up` without failing a request.

    Processes are replaced one after the other: the new process starts, loads and warms up the same models, and takes
    over; then the old one answers its requests in flight and ends. If a new process does not become ready, the old one
    keeps serving and the restart ends there. Settings do not change, and Redis keeps running. `kill -HUP` of
    `millstream up` does the same.
    """
    from millstream.client.cli.terminal import duration, emit, escape, results, show_rows, working

    folder = local_home(context, home)
    started = time.monotonic()
    with working("restarting", quiet=json_output) as show:
        replaced = asyncio.run(_restart(folder, what, show))
    seconds = round(time.monotonic() - started, 3)
    if json_output:
        emit({"replaced": replaced, "seconds": seconds})
        return
    console = results()
    rows = [
        [escape(one["process"]), str(one["pid_before"] or "-"), str(one["pid"]), duration(one["seconds"])]
        for one in replaced
    ]
    show_rows(console, ("PROCESS", "PID", "NEW PID", "TIME"), rows, right=("PID", "NEW PID", "TIME"))
    processes = "1 process" if len(replaced) == 1 else f"{len(replaced)} processes"
    console.print(f"\nrestarted {processes} in {duration(seconds)}")


async def _restart(home: Path, what: What, show: Callable[[str], None]) -> list[dict[str, Any]]:
    from millstream.services.supervisor.control import send_request
    from millstream.services.supervisor.lock import read_holder

    control = read_holder(home / "run").get("control")
    not_running = Failure(
        Code.UNAVAILABLE,
        f"no server is running in {home}: start it with `millstream up`, or set its folder with --home",
    )
    if not isinstance(control, str):
        raise not_running
    replaced = []
    try:
        async for event in send_request(Path(control), {"restart": what.value}):
            if event["event"] == "starting":
                show(f"{event['process']} ({event['replaced'] + 1} of {event['of']})")
            elif event["event"] == "replaced":
                replaced.append({name: value for name, value in event.items() if name != "event"})
    except OSError as error:
        raise not_running from error
    return replaced
