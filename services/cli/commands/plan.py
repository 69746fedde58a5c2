"""`millstream plan`: simulates a fleet with a trace of calls, before the machines are bought."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from millstream.services.cli.failures import wrong_usage
from millstream.services.cli.options import Endpoint, Json, Key, server_address

if TYPE_CHECKING:
    from millstream.services.cli.plan_models import KnownModels
    from millstream.services.placement.simulation.models import SimulatedModel
    from millstream.services.placement.simulation.report import Summary
    from millstream.services.placement.simulation.simulator import FleetOptions
    from millstream.services.placement.simulation.traffic import Trace

T = TypeVar("T")
GENERATED, SERVER = "generated", "server"
WORKERS, MEMORY = 2, "8GiB"
RESTART_HOURS_MIN = 0.1
#: what the controller orders, for people
REASONS = {
    "minimum": "loads for instances_min",
    "drain": "loads and unloads for restarts",
    "load": "further instances",
    "regular": "second instances",
    "prefetch": "loads ahead of a call",
    "spread": "moves",
    "idle": "unloads of what idles",
    "surplus": "unloads of surplus",
}
MODELS_MAX = 100_000
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")
FILE_BYTES_MAX = 1 << 30


ModelsSource = Annotated[
    str,
    typer.Option(
        "--models",
        metavar="FILE|server|FOLDER|N",
        help="Table of models (CSV, or a JSON list) with the columns name, memory_bytes, and maybe peak_bytes, "
        "load_s, run_s, pin, instances_min, instances_max, idle_s; `server`: those of a running server; a "
        "repository's folder; or a number of models to make up.",
    ),
]
TraceSource = Annotated[
    str,
    typer.Option(
        "--trace",
        metavar="FILE|generated",
        help="Calls (CSV) with the columns model and seconds; or `generated`: made up, with statistics as those of "
        "Azure Functions in 2019.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", min=1, max=10_000, help="Workers of the fleet; default: the server's, else 2."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Memory of each worker for models, like 8GiB or 500MB; default: that of the server's smallest worker, "
        "else 8GiB.",
    ),
]
Hours = Annotated[float, typer.Option("--hours", metavar="H", min=0.1, max=720, help="Length of a generated trace.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="S", min=0.001, max=86_400, help="How long a call waits.")]
Loads = Annotated[
    int, typer.Option("--loads", metavar="N", min=1, max=64, help="Loads that a worker makes at the same time.")
]
Runs = Annotated[
    int, typer.Option("--runs", metavar="N", min=1, max=1024, help="Runs that a worker makes at the same time.")
]
RestartHours = Annotated[
    float,
    typer.Option(
        "--restart-hours",
        metavar="H",
        min=0.0,
        max=8760.0,
        help="Hours in which each worker is replaced once, one after the other; 0: none is.",
    ),
]
NoController = Annotated[bool, typer.Option("--no-controller", help="Without a controller: only calls load models.")]
Compare = Annotated[
    bool, typer.Option("--compare", help="Also simulate two simpler rules: least recently used by bytes, by count.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Equal seeds give equal results.")]


def plan(
    context: typer.Context,
    models: ModelsSource = "500",
    trace: TraceSource = GENERATED,
    workers: Workers = None,
    memory: Memory = None,
    hours: Hours = 12.0,
    timeout: Timeout = 30.0,
    loads: Loads = 1,
    runs: Runs = 2,
    restart_hours: RestartHours = 0.0,
    no_controller: NoController = False,
    compare: Compare = False,
    seed: Seed = 0,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Tell how a fleet would do: how many calls find their model loaded, and how long the others wait.

    Simulates workers, gateways and the controller with the code that decides in them, under a virtual clock. Only
    `--models server` asks a server: for what its models take and how they are set. The first quarter of the trace
    fills the workers and is not counted. Not simulated: network, batches, failures, pools.

    A trace has the lines `model,seconds`, `digits,0.5`, `digits,62`, …; its models must be among the models.
    """
    from millstream.services.placement.simulation.simulator import ROUND_S, FleetOptions

    if 0 < restart_hours < RESTART_HOURS_MIN:
        raise wrong_usage(f"--restart-hours {restart_hours:g}: a restart takes seconds: at least {RESTART_HOURS_MIN:g}")
    known = _known(models, seed, context, endpoint, key)
    workers = workers or known.workers or WORKERS
    options = FleetOptions(
        workers,
        _memory_bytes(memory, known),
        loads,
        runs,
        timeout,
        0.0 if no_controller else ROUND_S,
        restart_hours * 3600 / workers,
    )
    calls = _trace(trace, known.models, hours, seed)
    with _progress(quiet=json_output) as progress:
        summaries = _simulate(known.models, options, calls, seed, progress, compare=compare)
    needed_bytes = sum(model.footprint.resident_bytes for model in known.models)
    if json_output:
        from millstream.services.cli.terminal import emit

        fleet = {"workers": workers, "memory_bytes": options.memory_bytes, "models": len(known.models)}
        counts = {"models_measured": known.measured, "models_bytes": needed_bytes, "seed": seed}
        emit({**fleet, **counts, "policies": [asdict(one) for one in summaries]})
    else:
        _show(summaries, known, needed_bytes, options)


def _simulate(
    models: list[SimulatedModel],
    options: FleetOptions,
    calls: Trace,
    seed: int,
    progress: Callable[[float], None],
    *,
    compare: bool,
) -> list[Summary]:
    """Return the summary of Millstream's policy; with `compare`, those of all policies. `progress`: takes a share."""
    from millstream.services.placement.simulation.policies import POLICIES
    from millstream.services.placement.simulation.report import summary_of
    from millstream.services.placement.simulation.simulator import Simulator

    names = list(POLICIES) if compare else ["millstream"]
    summaries = []
    for at, name in enumerate(names):
        simulator = Simulator(models, options, POLICIES[name], seed)
        outcome = simulator.run(calls, lambda share, at=at: progress((at + share) / len(names)))  # type: ignore[misc]
        summaries.append(summary_of(outcome))
    return summaries


def _memory_bytes(text: str | None, known: KnownModels) -> int:
    from millstream.services.process.memory_share import EVERY_POOL, parse_memory

    if text is None and known.memory_bytes:
        return known.memory_bytes
    if text is None and known.workers:
        raise wrong_usage("--memory: the server's workers have no limit; say what the simulated ones have, like 8GiB")
    if text is not None and text.startswith("-"):
        raise wrong_usage(f"--memory {text}: write a size like 8GiB or 500MB")
    sizes = _or_wrong_usage("--memory", lambda: parse_memory(text or MEMORY))
    if set(sizes) != {EVERY_POOL}:
        raise wrong_usage("--memory: all workers of the simulation are alike: give one size, like 8GiB")
    size = sizes[EVERY_POOL]
    if size < 1:
        raise wrong_usage("--memory: the simulation needs a size like 8GiB")
    return size


def _known(source: str, seed: int, context: typer.Context, endpoint: str | None, key: str | None) -> KnownModels:
    from millstream.services.cli.plan_models import KnownModels, models_of_repository, models_of_server
    from millstream.services.placement.simulation.models import generated_models, read_models

    if _NUMBER.fullmatch(source):
        if not (source.isdecimal() and len(source) <= len(str(MODELS_MAX)) and 1 <= int(source) <= MODELS_MAX):
            raise wrong_usage(f"--models {source}: between 1 and {MODELS_MAX:,} models can be made up")
        made_up = generated_models(int(source), seed)
        return KnownModels(made_up, len(made_up))
    if source == SERVER:
        from millstream.services.client.client import Client

        with Client(server_address(context, endpoint, key), retries=0) as client:
            found, statistics = client.placement(), client.statistics()
        return _or_wrong_usage("--models server", lambda: models_of_server(found, statistics))
    if Path(source).is_dir():
        return _or_wrong_usage(f"--models {source}", lambda: models_of_repository(Path(source)))

    def of_table() -> KnownModels:
        read = read_models(_rows(source))
        return KnownModels(read, len(read))

    return _or_wrong_usage(f"--models {source}", of_table)


def _trace(source: str, models: list[SimulatedModel], hours: float, seed: int) -> Trace:
    from millstream.services.placement.simulation.traffic import generated_trace, read_trace

    if source == GENERATED:
        made_up = generated_trace(len(models), hours, seed)
        if not len(made_up):
            raise wrong_usage(f"--hours {hours:g}: no call comes in this time; try more models or hours")
        return made_up
    return _or_wrong_usage(f"--trace {source}", lambda: read_trace(_rows(source), [one.name for one in models]))


def _rows(path: str) -> list[dict[str, Any]]:
    """Return the rows of a table. Raises ValueError."""
    file = Path(path)
    if file.stat().st_size > FILE_BYTES_MAX:
        raise ValueError("it is larger than 1 GiB")
    text = file.read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):
        return list(csv.DictReader(io.StringIO(text)))
    rows = json.loads(text)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("it is not a list of objects")
    return list(rows)


def _or_wrong_usage(what: str, read: Callable[[], T]) -> T:
    """Return what `read` returns; its errors become wrong usage of the option `what`."""
    from millstream.services.errors import Failure

    try:
        return read()
    except OSError as error:
        raise wrong_usage(f"{what}: {error.strerror or error}") from None
    except (ValueError, Failure) as error:
        message = str(error)
        raise wrong_usage(message if message.startswith("--") else f"{what}: {message}") from None


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on a terminal; yields a function that takes the share that is done."""
    from millstream.services.cli.terminal import notices

    console = notices()
    if quiet or not console.is_interactive:
        yield lambda _: None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("Simulating", total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _show(summaries: list[Summary], known: KnownModels, needed_bytes: int, options: FleetOptions) -> None:
    from millstream.services.cli.terminal import duration, results, show_rows, size

    console = results()
    figures: dict[str, Callable[[Summary], str]] = {
        "calls": lambda one: f"{one.calls:,}",
        "model was loaded (hit rate)": lambda one: f"{one.hit_rate:.2%}",
        "answered within 100 ms + run": lambda one: f"{one.in_time_share:.2%}",
        "waited for a load": lambda one: f"{one.cold_calls:,}",
        "  their median": lambda one: duration(one.cold_p50_s),
        "  their 99th percentile": lambda one: duration(one.cold_p99_s),
        "refused": _refusals,
        "timed out": lambda one: f"{one.expired:,}",
        "loads": lambda one: f"{one.loads:,}",
        "evictions": lambda one: f"{one.evictions:,}",
        "memory used": lambda one: f"{one.memory_share:.0%}",
    }
    for reason in dict.fromkeys(reason for one in summaries for reason in one.planned):
        title = f"  ordered by the controller: {REASONS.get(reason, reason)}"
        figures[title] = lambda one, reason=reason: f"{one.planned.get(reason, 0):,}"  # type: ignore[misc]
    rows = [[title, *(figure(one) for one in summaries)] for title, figure in figures.items()]
    names = [one.policy for one in summaries]
    memory = f"workers: {options.workers} of {size(options.memory_bytes)}"
    console.print(f"models: {len(known.models)}, together {size(needed_bytes)}; {memory}")
    if known.measured < len(known.models):
        console.print(
            f"{len(known.models) - known.measured} of the models were never loaded: their memory is predicted"
        )
    show_rows(console, ["", *names], rows, right=names)


def _refusals(summary: Summary) -> str:
    kinds = ", ".join(f"{number:,} {kind.replace('_', ' ')}" for kind, number in summary.refused.items())
    return kinds or "0"
