"""Measures what a batch costs each process, and compares two checkouts in turns.

python -m tests.bench.batch_path [--against FOLDER] [--seconds 3] [--rounds 3]

C, this checkout, the other one, … each with 1, 16 and 64 connections ─> us of CPU per batch by process, Redis' calls
per batch, and rate and p50 as ratios to C within one round. `--against` is a checkout with its own `.venv`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.bench import servers
from tests.bench.batch_cost import Cost, Stack, cost
from tests.bench.load import Load, json_payload, measure
from tests.kit import models

CONNECTIONS = (1, 16, 64)
PATH = "/v2/models/mlp/infer"


@contextmanager
def _stack(folder: Path, name: str, root: Path, model: Path) -> Iterator[Stack]:
    with servers.millstream_up(folder, name, ["--preload", f"mlp={model}"], root=root) as server:
        yield Stack(name, server, folder / name)


def _table(connections: int, bare: Sequence[Load], costs: dict[str, list[Cost]]) -> Table:
    table = Table(title=f"{connections} connections")
    for head in ("", "p50 us", "x C", "1/s", "x C", "rows", "gateway", "redis", "worker", "all", "calls", "scripts us"):
        table.add_column(head, justify="right")
    table.add_row("C", f"{median(one.p50_us for one in bare):.0f}", "", f"{median(one.rate for one in bare):.0f}")
    for name, found in costs.items():

        def middle(what: Callable[[Cost], float], found: Sequence[Cost] = found) -> float:
            return median(map(what, found))

        pairs = list(zip(found, bare, strict=True))
        table.add_row(
            name,
            f"{middle(lambda one: one.load.p50_us):.0f}",
            f"{median(ours.load.p50_us / one.p50_us for ours, one in pairs):.2f}",
            f"{middle(lambda one: one.load.rate):.0f}",
            f"{median(ours.load.rate / one.rate for ours, one in pairs):.3f}",
            f"{middle(lambda one: one.requests):.1f}",
            *(f"{middle(lambda one, of=of: one.cpu_us[of]):.0f}" for of in ("gateway", "redis", "worker")),  # type: ignore[misc]
            f"{middle(lambda one: sum(one.cpu_us.values())):.0f}",
            f"{middle(lambda one: one.calls):.1f}",
            f"{middle(lambda one: one.script_us):.1f}",
        )
    return table


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.batch_path", description="Measure what a batch costs.")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--seconds", type=int, default=3, help="seconds of each measurement (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is made; the median counts (default: 3)")
    parser.add_argument("--connections", type=int, nargs="+", default=CONNECTIONS)
    arguments = parser.parse_args()
    roots = {"this": servers.ROOT} | ({"other": arguments.against.resolve()} if arguments.against else {})
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as running:
        folder = Path(temporary)
        row = np.round(np.random.default_rng(5).standard_normal(64), 4).astype(np.float32)
        payload, model = json_payload(folder, "input", row), models.mlp(folder / "mlp.onnx")
        bare = running.enter_context(servers.ceiling(folder))
        stacks = [running.enter_context(_stack(folder, name, root, model)) for name, root in roots.items()]
        for connections in arguments.connections:
            ceilings: list[Load] = []
            costs: dict[str, list[Cost]] = {stack.name: [] for stack in stacks}
            for number in range(arguments.rounds):
                ceilings.append(measure(bare, PATH, payload, connections, arguments.seconds))
                for stack in stacks if number % 2 else reversed(stacks):
                    costs[stack.name].append(cost(stack, PATH, payload, connections, arguments.seconds))
            Console(width=140).print(_table(connections, ceilings, costs))


if __name__ == "__main__":
    main()
