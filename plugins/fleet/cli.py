"""`millstream autoscale`: shows how many workers each pool should have and why, or gives compose these numbers."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.client.address import ServerAddress
from millstream.client.cli.options import Endpoint, Json, Key, server_address
from millstream.client.cli.terminal import duration, emit, escape, rate, results, show_rows
from millstream.services.errors import Code, Failure
from millstream.services.process.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from millstream.client.documents import PoolScale

SERVICE_PREFIX = "worker-"  # the service of the pool cpu is worker-cpu
WATCH_S = 2.0  # between two looks
UNBOUNDED = "unbounded"  # the reason for the size of a pool without limits, which nothing changes
#: failures that --watch outlives: the gateway is replaced, a new controller takes the lead, docker has a problem
_PASSING = frozenset({Code.UNAVAILABLE, Code.OVERLOADED, Code.EXPIRED, Code.NOT_FOUND})


class Action(StrEnum):
    """What to do."""

    SHOW = "show"
    EXPLAIN = "explain"
    COMPOSE = "compose"


def autoscale(
    context: typer.Context,
    action: Annotated[
        Action, typer.Argument(metavar="show|explain|compose", help="What to do; default: show.")
    ] = Action.SHOW,
    pool: Annotated[str | None, typer.Argument(metavar="POOL", help="Only this pool.", show_default=False)] = None,
    run: Annotated[bool, typer.Option("--run", help="compose: run the command instead of printing it.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Do it again every 2 s, until Ctrl-C.")] = False,
    file: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="compose: a file of the project, as its `--file`."),
    ] = None,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Show how many workers each pool should have, by the controller, and why.

    explain prints the arithmetic of the last decision, line by line. compose prints the `docker compose` command that
    gives the services worker-POOL these numbers, and runs it with --run; with --watch it does so at each change, and
    waits while the gateway is away.
    """
    server = server_address(context, endpoint, key)
    options = [option for one in file or () for option in ("--file", str(one))]
    last: list[str] = []
    problem = ""  # that was said
    while True:
        try:
            pools = _pools(server, pool, fresh=action is Action.COMPOSE)
            if action is Action.COMPOSE:
                last = _compose(pools, last, options, run=run, json_output=json_output)
            elif json_output:
                emit(pools[0] if pool is not None else {"pools": pools})
            elif action is Action.EXPLAIN:
                _explain(results(), pools)
            else:
                _show(results(), pools)
            problem = ""
        except Failure as failure:
            if not watch or failure.code not in _PASSING:
                raise
            if failure.message != problem:
                print(f"{printable(failure.message)}; trying again", file=sys.stderr, flush=True)
            problem = failure.message
        if not watch:
            return
        sys.stdout.flush()
        time.sleep(WATCH_S)


def _pools(server: ServerAddress, pool: str | None, *, fresh: bool) -> list[PoolScale]:
    """Return the decisions about all pools, or one. Raises Failure if one is not known, or old and `fresh` is asked."""
    from millstream.client.client import Client

    with Client(server, retries=0) as client:
        pools = client.scale()
        names = [one["pool"] for one in pools]
        if pool is not None and pool not in names:
            known = ", ".join(names) or "none"
            raise Failure(Code.NOT_FOUND, f"no controller has decided about a pool '{pool}': the pools are {known}")
        wanted = names if pool is None else [pool]
        if fresh:
            return [client.pool_scale(name) for name in wanted]
    return [one for one in pools if one["pool"] in wanted]


def _show(console: Console, pools: list[PoolScale]) -> None:
    if not pools:
        console.print("[yellow]no controller has decided yet[/]: start one, without --no-controller")
        return
    columns = ["POOL", "WANTED", "READY", "LIMITS", "ARRIVE", "CAPACITY", "BUSY", "QUEUE", "OLDEST", "WHY"]
    rows = [
        [
            escape(one["pool"]),
            str(one["wanted"]),
            str(one["ready"]) if one["ready"] == one["wanted"] else f"[yellow]{one['ready']}[/]",
            f"{one['workers_min']} to {one['workers_max']}",
            f"{rate(one['arrival_rows_per_s'])}/s",
            f"{rate(one['capacity_rows_per_s'])}/s" if one["capacity_rows_per_s"] else "-",
            f"{one['utilisation']:.0%}",
            str(one["queue_rows"]),
            duration(one["oldest_wait_s"]) if one["oldest_wait_s"] else "-",
            escape(one["reason"]),
        ]
        for one in pools
    ]
    show_rows(console, columns, rows, right=("WANTED", "READY", "ARRIVE", "CAPACITY", "BUSY", "QUEUE", "OLDEST"))


def _explain(console: Console, pools: list[PoolScale]) -> None:
    for number, one in enumerate(pools):
        if number:
            console.print()
        console.print(f"[bold]{escape(one['pool'])}[/]")
        for line in one["explanation"]:
            console.print(f"  {escape(line)}")


def wanted_of(pools: list[PoolScale]) -> dict[str, int]:
    """Return the workers that compose is to run, by pool, of the pools for which limits are set."""
    return {one["pool"]: one["wanted"] for one in pools if one["reason"] != UNBOUNDED}


def _compose(pools: list[PoolScale], last: list[str], options: list[str], *, run: bool, json_output: bool) -> list[str]:
    """Print or run the command, if it differs from the last one; return it."""
    wanted = wanted_of(pools)
    command = compose_command(wanted, options)
    if command == last:
        return last
    if json_output:
        emit({"command": command, "wanted": wanted})
    else:
        print(shlex.join(command))
    sys.stdout.flush()
    if run and command:
        try:
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        except FileNotFoundError:
            raise Failure(Code.UNAVAILABLE, "docker is not installed here, or not on PATH") from None
        except subprocess.CalledProcessError as error:
            raise Failure(Code.UNAVAILABLE, f"docker compose ended with status {error.returncode}") from None
    return command


def compose_command(wanted: Mapping[str, int], options: Sequence[str] = ()) -> list[str]:
    """Return the command; empty if no pool is named. Running containers are left as they are.

    Args:
        wanted: workers by pool.
        options: of `docker compose`, like `--file x.yml`.
    """
    if not wanted:
        return []
    scales: list[str] = []
    for pool, workers in sorted(wanted.items()):
        scales += ["--scale", f"{SERVICE_PREFIX}{pool}={workers}"]
    services = [f"{SERVICE_PREFIX}{pool}" for pool in sorted(wanted)]
    return ["docker", "compose", *options, "up", "--detach", "--no-recreate", "--no-deps", *scales, *services]
