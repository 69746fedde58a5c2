"""`millstream plan`: simulates a fleet with a trace of calls, before the machines are bought."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from millstream.services.cli.failures import wrong_usage
from millstream.services.cli.options import Json

if TYPE_CHECKING:
    from millstream.services.placement.simulation.models import SimulatedModel
    from millstream.services.placement.simulation.report import Summary
    from millstream.services.placement.simulation.traffic import Trace

T = TypeVar("T")
GENERATED = "generated"
MODELS_MAX = 100_000
FILE_BYTES_MAX = 1 << 30


def plan(
    models: Annotated[
        str,
        typer.Option(
            "--models",
            metavar="FILE|N",
            help="Table of models (CSV, or a JSON list) with the columns name, memory_bytes, and maybe peak_bytes, "
            "load_s, run_s, pin; or a number of models to make up.",
        ),
    ] = "500",
    trace: Annotated[
        str,
        typer.Option(
            "--trace",
            metavar="FILE|generated",
            help="Calls (CSV) with the columns model and seconds; or `generated`: made up, with statistics as those of "
            "Azure Functions in 2019.",
        ),
    ] = GENERATED,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, max=10_000, help="Workers of the fleet.")
    ] = 2,
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Memory of each worker for models, like 8GiB or 500MB.")
    ] = "8GiB",
    hours: Annotated[
        float, typer.Option("--hours", metavar="H", min=0.1, max=720, help="Length of a generated trace.")
    ] = 12.0,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0.001, max=86_400, help="How long a call waits.")
    ] = 30.0,
    loads: Annotated[
        int, typer.Option("--loads", metavar="N", min=1, max=64, help="Loads that a worker makes at the same time.")
    ] = 1,
    runs: Annotated[
        int, typer.Option("--runs", metavar="N", min=1, max=1024, help="Runs that a worker makes at the same time.")
    ] = 2,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also simulate two simpler rules: least recently used by bytes, by count.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Equal seeds give equal results.")] = 0,
    json_output: Json = False,
) -> None:
    """Tell how a fleet would do: how many calls find their model loaded, and how long the others wait.

    Simulates workers with the code that decides in gateways and workers, under a virtual clock; needs no server. The
    first quarter of the trace fills the workers and is not counted. Not simulated: network, batches, failures.
    """
    from millstream.services.placement.simulation.policies import POLICIES
    from millstream.services.placement.simulation.report import summary_of
    from millstream.services.placement.simulation.simulator import FleetOptions, Simulator

    options = FleetOptions(workers, _memory_bytes(memory), loads, runs, timeout)
    known = _models(models, seed)
    calls = _trace(trace, known, hours, seed)
    names = list(POLICIES) if compare else ["millstream"]
    summaries = []
    with _progress(quiet=json_output) as progress:
        for at, name in enumerate(names):
            simulator = Simulator(known, options, POLICIES[name], seed)
            outcome = simulator.run(calls, lambda share, at=at: progress((at + share) / len(names)))  # type: ignore[misc]
            summaries.append(summary_of(outcome))
    needed_bytes = sum(model.footprint.resident_bytes for model in known)
    if json_output:
        from millstream.services.cli.terminal import emit

        fleet = {"workers": workers, "memory_bytes": options.memory_bytes, "models": len(known)}
        emit({**fleet, "models_bytes": needed_bytes, "seed": seed, "policies": [asdict(one) for one in summaries]})
    else:
        _show(summaries, needed_bytes, options.memory_bytes * workers)


def _memory_bytes(text: str) -> int:
    from millstream.services.process.memory_share import EVERY_POOL, parse_memory

    sizes = _or_wrong_usage("--memory", lambda: parse_memory(text))
    if set(sizes) != {EVERY_POOL}:
        raise wrong_usage("--memory: all workers of the simulation are alike: give one size, like 8GiB")
    size = sizes[EVERY_POOL]
    if size < 1:
        raise wrong_usage("--memory: the simulation needs a size like 8GiB")
    return size


def _models(source: str, seed: int) -> list[SimulatedModel]:
    from millstream.services.placement.simulation.models import generated_models, read_models

    if source.isdecimal():
        if not 1 <= int(source) <= MODELS_MAX:
            raise wrong_usage(f"--models {source}: between 1 and {MODELS_MAX:,} models can be made up")
        return generated_models(int(source), seed)
    return _or_wrong_usage(f"--models {source}", lambda: read_models(_rows(source)))


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


def _show(summaries: list[Summary], needed_bytes: int, memory_bytes: int) -> None:
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
        "  ahead of a call (moves)": lambda one: f"{one.prefetches:,}",
        "evictions": lambda one: f"{one.evictions:,}",
        "memory used": lambda one: f"{one.memory_share:.0%}",
    }
    rows = [[title, *(figure(one) for one in summaries)] for title, figure in figures.items()]
    names = [one.policy for one in summaries]
    console.print(f"All models together take {size(needed_bytes)}; the workers have {size(memory_bytes)}.")
    show_rows(console, ["", *names], rows, right=names)


def _refusals(summary: Summary) -> str:
    kinds = ", ".join(f"{number:,} {kind.replace('_', ' ')}" for kind, number in summary.refused.items())
    return kinds or "0"
