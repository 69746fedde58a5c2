"""`millstream plan`: simulates a fleet with a trace of calls, before the machines are bought."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from millstream.client.cli.failures import wrong_usage
from millstream.client.cli.options import Endpoint, Json, Key, server_address

if TYPE_CHECKING:
    from millstream.plugins.plan.models import KnownModels
    from millstream.plugins.plan.simulation.fleet_options import FleetOptions
    from millstream.plugins.plan.simulation.models import SimulatedModel
    from millstream.plugins.plan.simulation.report import Summary
    from millstream.plugins.plan.simulation.traffic import Trace

T = TypeVar("T")
GENERATED, SERVER = "generated", "server"
WORKERS, MEMORY = 2, "8GiB"
RESTART_HOURS_MIN = 0.1
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
        metavar="FILE|FOLDER|generated",
        help="Calls (CSV) with the columns model and seconds; an access log of a gateway, or a folder of logs with "
        "some (MILLSTREAM_ACCESS_LOG=file); or `generated`: made up, with statistics as those of Azure Functions in "
        "2019.",
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
Pools = Annotated[
    list[str] | None,
    typer.Option(
        "--pool",
        metavar="NAME=N[,OPTION=VALUE…]",
        help="Pool with N workers, the preferred one first, can be repeated. Options: memory=16GiB of each worker, "
        "speed=8 (runs take an eighth of what the models say), runs=2, loads=1. Default: those of the server if it has "
        "several, else one pool.",
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
    pool: Pools = None,
    hours: Hours = 3.0,
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
    fills the workers and is not counted. Not simulated: network, batches, failures.

    A trace has the lines `model,seconds`, `digits,0.5`, `digits,62`, …; its models must be among the models.
    """
    if 0 < restart_hours < RESTART_HOURS_MIN:
        raise wrong_usage(f"--restart-hours {restart_hours:g}: a restart takes seconds: at least {RESTART_HOURS_MIN:g}")
    if pool and workers:
        raise wrong_usage("--workers: --pool says how many workers there are")
    known = _known(models, seed, context, endpoint, key)
    options = _fleet(known, pool or [], workers, memory, loads, runs)
    total = sum(one.workers for one in options.each_pool())
    options = replace(options, timeout_s=timeout, restart_s=restart_hours * 3600 / total)
    if no_controller:
        options = replace(options, round_s=0.0)
    simulated = known.models if options.pools else _in_one_pool(known.models)
    calls = _trace(trace, known.models, hours, seed)
    with _progress(quiet=json_output) as progress:
        summaries = _simulate(simulated, options, calls, seed, progress, compare=compare)
    needed_bytes = sum(model.footprint.resident_bytes for model in known.models)
    if json_output:
        from millstream.client.cli.terminal import emit

        fleet = {"workers": total, "memory_bytes": min(one.memory_bytes for one in options.each_pool())}
        counts = {"models": len(known.models), "models_measured": known.measured, "models_bytes": needed_bytes}
        shown = [asdict(one) for one in options.each_pool()]
        emit({**fleet, **counts, "seed": seed, "pools": shown, "policies": [asdict(one) for one in summaries]})
    else:
        from millstream.plugins.plan.view import show_plan

        show_plan(summaries, known, needed_bytes, options)


def _in_one_pool(models: list[SimulatedModel]) -> list[SimulatedModel]:
    """Return models that one pool serves, whatever pools they name; say so if they name several."""
    from millstream.client.cli.terminal import notices

    if len({name for one in models for name in one.pools}) > 1:
        notices().print("the pools that models name are left out: one pool is simulated; see --pool", style="dim")
    return [replace(one, pools=()) for one in models]


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
    from millstream.plugins.plan.simulation.policies import POLICIES
    from millstream.plugins.plan.simulation.report import summary_of
    from millstream.plugins.plan.simulation.simulator import Simulator

    names = list(POLICIES) if compare else ["millstream"]
    summaries = []
    for at, name in enumerate(names):
        simulator = Simulator(models, options, POLICIES[name], seed)
        outcome = simulator.run(calls, lambda share, at=at: progress((at + share) / len(names)))  # type: ignore[misc]
        summaries.append(summary_of(outcome))
    return summaries


def _fleet(
    known: KnownModels, pools: list[str], workers: int | None, memory: str | None, loads: int, runs: int
) -> FleetOptions:
    """Return the workers to simulate: the pools of the command, else the pools of the server, else one pool."""
    from millstream.plugins.plan.pools import check_pools, parse_pools
    from millstream.plugins.plan.simulation.fleet_options import FleetOptions, SimulatedPool
    from millstream.plugins.plan.simulation.fleet_state import POOL

    number = workers or known.workers or WORKERS
    if pools:
        default = SimulatedPool(POOL, number, _memory_bytes(memory or MEMORY, known), loads, runs)
        found = _or_wrong_usage("--pool", lambda: parse_pools(pools, default))
    elif len(known.pools) > 1 and not (workers or memory):
        if unlimited := [one.name for one in known.pools if not one.memory_bytes]:
            raise wrong_usage(f"--pool: the workers of the server's pool {unlimited[0]} have no limit; name the pools")
        found = tuple(SimulatedPool(one.name, one.workers, one.memory_bytes, loads, runs) for one in known.pools)
    else:
        return FleetOptions(number, _memory_bytes(memory, known), loads, runs)
    _or_wrong_usage("--models", lambda: check_pools(known.models, found))
    return FleetOptions(sum(one.workers for one in found), found[0].memory_bytes, loads, runs, pools=found)


def _memory_bytes(text: str | None, known: KnownModels) -> int:
    from millstream.services.process.machine_share import EVERY_POOL, parse_memory

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
    from millstream.plugins.plan.models import KnownModels, models_of_repository, models_of_server
    from millstream.plugins.plan.simulation.models import generated_models, read_models

    if _NUMBER.fullmatch(source):
        if not (source.isdecimal() and len(source) <= len(str(MODELS_MAX)) and 1 <= int(source) <= MODELS_MAX):
            raise wrong_usage(f"--models {source}: between 1 and {MODELS_MAX:,} models can be made up")
        made_up = generated_models(int(source), seed)
        return KnownModels(made_up, len(made_up))
    if source == SERVER:
        from millstream.client.client import Client

        with Client(server_address(context, endpoint, key), retries=0) as client:
            found, statistics = client.placement(), client.statistics()
        return _or_wrong_usage("--models server", lambda: models_of_server(found, statistics))
    if Path(source).is_dir():
        return _or_wrong_usage(f"--models {source}", lambda: models_of_repository(Path(source)))

    def of_table() -> KnownModels:
        read = read_models(_rows_of(_text(Path(source))))
        return KnownModels(read, len(read))

    return _or_wrong_usage(f"--models {source}", of_table)


def _trace(source: str, models: list[SimulatedModel], hours: float, seed: int) -> Trace:
    from millstream.plugins.plan.simulation.traffic import generated_trace, read_trace

    if source == GENERATED:
        made_up = generated_trace(len(models), hours, seed)
        if not len(made_up):
            raise wrong_usage(f"--hours {hours:g}: no call comes in this time; try more models or hours")
        return made_up
    names = [one.name for one in models]

    def of_files() -> Trace:
        path = Path(source)
        if path.is_dir():
            return _logged_trace(path, names)
        text = _text(path)
        return _logged_trace(path, names) if _is_access_log(text) else read_trace(_rows_of(text), names)

    return _or_wrong_usage(f"--trace {source}", of_files)


def _logged_trace(path: Path, names: list[str]) -> Trace:
    """Return the calls of the access logs in a file or a folder. Raises ValueError, OSError."""
    from millstream.client.cli.terminal import notices
    from millstream.plugins.plan.access_trace import calls_of, log_files, trace_of

    files = log_files(path)
    if not files:
        raise ValueError("it has no access log: start the server with MILLSTREAM_ACCESS_LOG=file")
    logged = trace_of(chain.from_iterable(calls_of(_text(file).splitlines()) for file in files), names)
    if logged.left_out:
        notices().print(f"{logged.left_out:,} logged calls are to none of the models: they are left out", style="dim")
    return logged.trace


def _is_access_log(text: str) -> bool:
    from millstream.plugins.plan.access_trace import LOOKED_AT_LINES, is_access_log

    return is_access_log(list(islice(io.StringIO(text), LOOKED_AT_LINES)))


def _text(file: Path) -> str:
    """Return the text of a file. Raises ValueError, OSError."""
    if file.stat().st_size > FILE_BYTES_MAX:
        raise ValueError("it is larger than 1 GiB")
    return file.read_text(encoding="utf-8-sig")


def _rows_of(text: str) -> list[dict[str, Any]]:
    """Return the rows of a table. Raises ValueError."""
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
    from millstream.client.cli.terminal import notices

    console = notices()
    if quiet or not console.is_interactive:
        yield lambda _: None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("Simulating", total=1.0)
        yield lambda share: bar.update(task, completed=share)
