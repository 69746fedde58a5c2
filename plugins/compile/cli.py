"""`millstream race` measures compiled forms of a version; `millstream compile undo` takes its verdict back."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.client.cli.failures import wrong_usage
from millstream.client.cli.options import Endpoint, Json, Key, Name, Version, server_address
from millstream.client.cli.terminal import ago, emit, escape, results, show_detail, show_rows
from millstream.services.errors import Code, Failure

if TYPE_CHECKING:
    from millstream.client.client import Client
    from millstream.client.documents import Race
    from millstream.services.cli.doctor.machine import Check

POLL_S = 0.5  # between two pictures of a race
WHY_CHARACTERS_MAX = 400
_COLOURS = {"won": "green", "lost": "", "inaccurate": "yellow", "failed": "red", "skipped": "dim", "unavailable": "dim"}
_RUNNING = frozenset({"queued", "running"})


RacePool = Annotated[
    str | None, typer.Option(metavar="NAME", help="Pool whose worker runs it; default: the first that has it.")
]
Targets = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME",
        help="Targets, or candidates of a report, that take part; default: all that are installed.",
    ),
]
Samples = Annotated[
    Path | None,
    typer.Option(metavar="FILE.npz", help="Real inputs: an array input/NAME for each input; kept for later races."),
]
AcceptRandomSamples = Annotated[
    bool,
    typer.Option("--accept-random-samples", help="Let int8 and others that need real inputs race without them."),
]
CosineMin = Annotated[
    float | None,
    typer.Option(metavar="X", min=-1, max=1, help="Least cosine similarity of each output; default 0.999."),
]
AgreementMin = Annotated[
    float | None,
    typer.Option(metavar="X", min=0, max=1, help="Least share of rows with the same largest element; default 0.99."),
]
Wait = Annotated[
    bool, typer.Option(help="Return at its end, with code 0 if there is a verdict; --no-wait: leave it running.")
]
Show = Annotated[bool, typer.Option("--show", help="Show the race, and begin none.")]
Cancel = Annotated[bool, typer.Option("--cancel", help="Cancel the race that waits or runs.")]
Reproduce = Annotated[
    str | None, typer.Option(metavar="ROW", help="Print the command that measures one row of the report again.")
]


def race(
    context: typer.Context,
    name: Name,
    version: Version = None,
    pool: RacePool = None,
    targets: Targets = None,
    samples: Samples = None,
    accept_random_samples: AcceptRandomSamples = False,
    cosine_min: CosineMin = None,
    agreement_min: AgreementMin = None,
    wait: Wait = True,
    show: Show = False,
    cancel: Cancel = False,
    reproduce: Reproduce = None,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Compile a version with every compiler that is installed, measure, check the answers, and serve the fastest.

    A worker that serves the version runs the race at low priority. The version goes on serving; the winner takes over
    without a request lost, and `millstream compile undo` takes it back. The command waits for the end and shows the
    progress; Ctrl-C leaves the race running.
    """
    if sum((show, cancel, reproduce is not None)) > 1:
        raise wrong_usage("--show, --cancel and --reproduce exclude each other")
    try:
        content = samples.read_bytes() if samples is not None else None
    except OSError as error:
        raise wrong_usage(f"--samples: {samples} cannot be read: {error.strerror}") from error
    given = {"cosine_min": cosine_min, "agreement_min": agreement_min}
    from millstream.client.client import Client

    with Client(server_address(context, endpoint, key), retries=0) as client:
        number = version if version is not None else serving_version(client, name)
        if reproduce is not None:
            print(_reproduce(client.race(name, number, pool=pool), reproduce))
            return
        if show or cancel:
            found = client.cancel_race(name, number, pool=pool) if cancel else client.race(name, number, pool=pool)
            _show(found, json_output=json_output)
            return
        if content is not None:
            client.put_race_samples(name, number, content)
        found = client.begin_race(
            name,
            number,
            targets=[one for part in (targets or "").split(",") if (one := part.strip())],
            pool=pool,
            accept_random_samples=accept_random_samples,
            gate={name: value for name, value in given.items() if value is not None},
        )
        if wait:
            found = _follow(client, found)
        _show(found, json_output=json_output)
        if wait and found["state"] != "decided":
            raise Failure(Code.MODEL, f"no verdict was reached: {found['why'] or found['state']}")


def serving_version(client: Client, name: str) -> int:
    found = client.model(name)
    number = found.get("serving") or found["active"]
    if number is None:
        raise Failure(Code.CONFLICT, f"{name} has no version that serves: name one with --version")
    return int(number)


def _follow(client: Client, found: Race) -> Race:
    """Show the race while it runs; return it at its end."""
    import time

    from rich.live import Live

    console = results()
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while found["state"] in _RUNNING:
            if console.is_terminal:
                live.update(_progress(found))
            time.sleep(POLL_S)
            found = client.race(found["model"], found["version"], pool=found["pool"])
    return found


def _progress(found: Race) -> Any:
    from rich.table import Table
    from rich.text import Text

    event = found["progress"]
    stage = event.get("stage", found["state"])
    of = f"{event.get('done', 0)} of {event['total']} candidates" if event.get("total") else found["why"]
    table = Table(box=None, pad_edge=False, title_justify="left")
    seconds = f", {event['seconds']:.0f} s" if event.get("seconds") else ""
    what = f"{stage} {event.get('candidate', '')} {of}{seconds}"
    table.title = Text(f"{found['model']} version {found['version']}: {what}")
    table.add_column("CANDIDATE")
    table.add_column("TIMES AS FAST", justify="right")
    for candidate, ratio in sorted(event.get("ratios", {}).items(), key=lambda pair: -pair[1]):
        table.add_row(Text(str(candidate)), f"{ratio:.2f}")
    return table


def _show(found: Race, *, json_output: bool) -> None:
    if json_output:
        emit(found)
        return
    console = results()
    console.print(f"[bold]{escape(found['model'])}[/] version {found['version']}  {found['state']}")
    show_detail(console, "  pool      ", escape(f"{found['pool']} ({found['kind']})"))
    if found["why"]:
        show_detail(console, "  why       ", escape(found["why"]))
    if found["baseline"]:
        show_detail(console, "  baseline  ", escape(found["baseline"]))
    if found["state"] == "decided":
        what = f"{found['winner']}, {found['ratio']:.2f} times as fast" if found["winner"] else "the baseline"
        show_detail(console, "  winner    ", escape(what), style="green")
        show_detail(console, "  serving   ", "yes" if found["serving"] else "the version's own file")
    if found["undone"]:
        undone = f"{ago(found['undone']['at'])}: {found['undone']['why']}"
        show_detail(console, "  undone    ", escape(undone), style="red")
    for note in (found["report"] or {}).get("notes", ()):
        show_detail(console, "  note      ", escape(note), style="yellow")
    if found["rows"]:
        console.print()
        columns = ("ROW", "CANDIDATE", "VERDICT", "TIMES AS FAST", "COSINE")
        absent = [] if found["options"]["targets"] else _absent(found["rows"])
        raced = [(number, row) for number, row in enumerate(found["rows"], 1) if row["target"] not in absent]
        show_rows(console, columns, [_cells(*one) for one in raced], right=("ROW", "TIMES AS FAST", "COSINE"))
        console.print()
        for why, numbers in _reasons(raced).items():
            show_detail(console, f"{', '.join(map(str, numbers))}: ", escape(why[:WHY_CHARACTERS_MAX]))
        if absent:
            console.print(f"\nnot here: {', '.join(absent)} (`millstream doctor devices` says why)", soft_wrap=True)


def _absent(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the targets that are not installed, or are for other devices."""
    return [row["target"] for row in rows if row["verdict"] == "unavailable"]


def _reasons(rows: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, list[int]]:
    """Return the numbers of the rows that have each reason."""
    reasons: dict[str, list[int]] = {}
    for number, row in rows:
        if row.get("why"):
            reasons.setdefault(str(row["why"]), []).append(number)
    return reasons


def _cells(number: int, row: dict[str, Any]) -> tuple[str, ...]:
    colour = _COLOURS.get(row["verdict"], "")
    ratio = f"{row['ratio']:.2f}" if row.get("ratio") is not None else "-"
    return (
        str(number),
        escape(row["candidate"]),
        f"[{colour}]{row['verdict']}[/]" if colour else row["verdict"],
        ratio,
        f"{row['cosine_min']:.5f}" if row.get("cosine_min") is not None else "-",
    )


def _reproduce(found: Race, wanted: str) -> str:
    """Return the command that races one row of a report again, against the baseline and what serves."""
    from millstream.plugins.compile.race.report import Gate

    rows = found["rows"]
    numbered = enumerate(rows, 1)
    row = next((one for at, one in numbered if wanted in {str(at), one["candidate"], one["target"]}), None)
    if row is None:
        known = ", ".join(f"{number} ({one['candidate']})" for number, one in enumerate(rows, 1))
        raise wrong_usage(f"--reproduce: there is no row {wanted!r}; the report has {known or 'no rows'}")
    command = ["millstream", "race", found["model"], "--version", str(found["version"]), "--pool", found["pool"]]
    command += ["--targets", row["candidate"]]
    if found["options"]["accept_random_samples"]:
        command.append("--accept-random-samples")
    given: dict[str, Any] = {**found["options"]["gate"]}
    for name, usual in Gate().model_dump().items():
        if given.get(name, usual) != usual:
            command += [f"--{name.replace('_', '-')}", str(given[name])]
    return shlex.join(command)


class Action(StrEnum):
    """What to do with the compiled form that serves."""

    UNDO = "undo"


def compile_(
    context: typer.Context,
    action: Annotated[Action, typer.Argument(help="What to do with the compiled form.", show_default=False)],
    name: Name,
    version: Version = None,
    pool: Annotated[
        str | None, typer.Option(metavar="NAME", help="Pool of the race; default: the one that was raced last.")
    ] = None,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Serve the version's own file again: take the verdict of `millstream race` back.

    Workers swap without losing a request. The report of the race stays; `millstream race NAME` begins a new one.
    """
    from millstream.client.client import Client

    del action  # there is one
    with Client(server_address(context, endpoint, key), retries=0) as client:
        number = version if version is not None else serving_version(client, name)
        found = client.undo_race(name, number, pool=pool)
    if json_output:
        emit(found)
        return
    results().print(f"{escape(name)} version {number} is served by its own file")


def target_checks() -> list[Check]:
    """Return what each target can use on this machine, for `millstream doctor devices`. Never fails."""
    from millstream.plugins.compile.targets import TARGETS
    from millstream.services.cli.doctor.machine import Check
    from millstream.services.metrics.gpus import gpus

    devices = ["cpu", *(f"cuda:{number}" for number in range(len(gpus()) or 1))]
    checks = []
    for target in TARGETS:
        missing = {device: target.available(device) for device in devices}
        usable = next((device for device, lacks in missing.items() if lacks is None), None)
        lacking = [lacks for lacks in missing.values() if lacks is not None]
        if usable is not None:
            checks.append(Check(target.name, "ok", usable))
        else:  # what the device lacks that it is meant for
            meant = next((lacks for lacks in lacking if lacks.install), lacking[0])
            checks.append(Check(target.name, "warn", meant.why, meant.install))
    return checks
