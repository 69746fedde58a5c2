"""Measure how fast Millstream is on this machine and print it; nothing is asserted.

python -m tests.bench [--seconds 5] [--rounds 3] [--json] [--write docs/benchmarks.md]
python -m tests.bench --many 10,100,1000
python -m tests.bench --console 1000
python -m tests.bench --functions
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import datetime
from pathlib import Path

from rich.console import Console

from tests.bench import chart, console, figures, functions, many, report
from tests.bench.errors import LoadError
from tests.bench.grpc_load import require_h2load
from tests.bench.load import require_wrk
from tests.bench.servers import StartError

CORES_MIN = 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure how fast Millstream is here.")
    parser.add_argument("--seconds", type=int, default=5, help="seconds of each measurement (default: 5)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is made; the median counts (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the page for the documentation")
    parser.add_argument("--many", metavar="SIZES", help="measure only what many models cost, with so many: 10,100,1000")
    parser.add_argument("--console", type=int, metavar="MODELS", help="measure only what the console costs a gateway")
    parser.add_argument("--functions", action="store_true", help="measure only what a step in Python costs")
    return parser.parse_args()


def main() -> int:
    """Run the benchmarks; return 0 when everything was measured, whatever the figures are, and 2 when it was not."""
    arguments = _arguments()
    progress = Console(stderr=True)
    cores = sorted(os.sched_getaffinity(0))
    try:
        if len(cores) < CORES_MIN:
            raise LoadError("the benchmarks need two cores: one for what is measured, one for the load")
        if arguments.many:
            return _many([int(size) for size in arguments.many.split(",")], progress)
        if arguments.functions:
            for line in functions.lines():
                print(line)
            return 0
        if arguments.console:
            with progress.status("starting") as status:
                for line in console.lines(console.run(arguments.console, status.update)):
                    print(line)
            return 0
        require_wrk()
        require_h2load()
        with progress.status("starting") as status:
            result = figures.run(arguments.rounds, arguments.seconds, status.update, cores)
    except (LoadError, StartError) as error:
        progress.print(str(error), style="red", markup=False, soft_wrap=True)
        return 2
    machine = report.this_machine(datetime.now().date())
    if arguments.json:
        Console().print_json(data=report.as_json(result, machine))
    else:
        Console().print(report.figures_table(result))
    if arguments.write:
        page = report.page(result, machine, arguments.rounds, arguments.seconds)
        arguments.write.write_text(page)
        arguments.write.with_suffix(".svg").write_text(chart.plot_of(page))
    return 0


def _many(sizes: list[int], progress: Console) -> int:
    found = []
    with progress.status("starting") as status:
        for one in many.run(sizes, status.update):
            found.append(one)
            progress.print(one)
    for table in many.tables(found):
        Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
