"""make bench-race: race real architectures here, print a table of all candidates, and write docs/compilers.md.

python -m tests.bench.race [--quick] [--only NAME …] [--threads N] [--write]
Ratios only, against the version as it is served without a race. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from millstream.plugins.compile.race.report import RaceReport, RaceTask, Row
from millstream.plugins.compile.race.samples import write_samples
from millstream.plugins.compile.worker.driver import run_race
from millstream.services.device import find_device
from millstream.workers.backends import get_backend
from tests.bench.race_models import Array, Raced, all_models
from tests.bench.race_neighbour import measure_neighbour
from tests.kit.races import race_task

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/compilers.md"
BEGIN, END = "<!-- race: begin -->", "<!-- race: end -->"
HEADS = ("model", "candidate", "verdict", "times as fast", "cosine", "arg-max", "compile s", "size", "why")
WHY_CHARACTERS_MAX = 90


def race_of(raced: Raced, folder: Path, threads: int, targets: Sequence[str]) -> tuple[RaceTask, RaceReport]:
    """Race one model, with its samples sent as a user would send them."""
    folder.mkdir()
    samples = folder / "samples.npz"
    write_samples(samples, raced.samples)
    content = raced.model.SerializeToString()
    task = race_task(
        folder, content, raced.signature, threads=threads, targets=tuple(targets),
        samples=samples, embeddings=raced.embeddings,
    )  # fmt: skip
    return task, run_race(task, lambda _: None)


def lines_of(raced: Raced, report: RaceReport) -> list[str]:
    """Return the lines of one model in Markdown."""
    lines = []
    for row in report.rows:
        interval = "" if row.ratio is None else f"{row.ratio:.2f}"
        cells = [raced.name, row.candidate, row.verdict, interval, _figure(row.cosine_min), _figure(row.agreement_min)]
        cells += [f"{row.compile_s:.1f}", f"{row.size_bytes >> 10} KiB" if row.size_bytes else "", _why(row)]
        if row.verdict != "unavailable":
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def accuracy_of(task: RaceTask, report: RaceReport, raced: Raced) -> str:
    """Return the accuracy on the held-out part, of the baseline and of what won."""
    assert raced.held_out is not None
    inputs, labels = raced.held_out
    row = report.row(report.winner) if report.winner is not None else None
    before = _share(task, None, inputs, labels)
    after = before if row is None else _share(task, row, inputs, labels)
    return f"{raced.name}: accuracy on the held-out part {before:.2%} before, {after:.2%} after the race"


def _share(task: RaceTask, row: Row | None, inputs: Array, labels: Array) -> float:
    """Return the share of right labels."""
    path, backend, options = task.folder / task.manifest.served, task.backend, {}
    if row is not None and row.compiled is not None:
        backend, options = row.compiled.backend, dict(row.compiled.options)
        path = task.cache / row.folder / row.compiled.files[0] if row.compiled.files else path
    instance = get_backend(backend).load(path, task.manifest.signature, "cpu", task.threads, options=options)
    try:
        [scores] = instance.run({"x": inputs})
        return float(np.mean(scores.argmax(axis=1) == labels))
    finally:
        instance.close()


def neighbour_of(folder: Path) -> str:
    """Return what a race costs another model of the same worker."""
    found = measure_neighbour(folder)
    race = f"race of {found.seconds:.0f} s, {found.candidates} candidates measured"
    p99 = f"{found.beside_p99_ms:.1f} ms, quiet {found.quiet_p99_ms:.1f} ms; {race}"
    return f"p99 of another model of the worker during a race: {found.slowdown:.2f} x (wanted: at most 1.5)\n  ({p99})"


def _figure(number: float | None) -> str:
    return "" if number is None else f"{number:.4f}"


def _why(row: Row) -> str:
    text = " ".join(row.why.split()).replace("|", "\\|")
    return text if len(text) <= WHY_CHARACTERS_MAX else text[:WHY_CHARACTERS_MAX] + "…"


def main() -> None:
    """Race all models, print the table, and write it if asked to."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.race", description="Race real architectures here.")
    parser.add_argument("--quick", action="store_true", help="smaller models")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=(), help="models whose name contains one of these")
    parser.add_argument("--targets", nargs="+", default=())
    parser.add_argument("--neighbour", action="store_true", help="only measure what a race costs another model")
    parser.add_argument("--write", action="store_true", help="write docs/compilers.md")
    options = parser.parse_args()
    lines, summary = [], []
    with tempfile.TemporaryDirectory() as folder:
        summary.append(f"- {neighbour_of(Path(folder))}")
        print(summary[-1], flush=True)
        if options.neighbour:
            return
        chosen = [
            raced
            for raced in all_models(quick=options.quick).values()
            if not options.only or any(word.lower() in raced.name.lower() for word in options.only)
        ]
        for at, raced in enumerate(chosen):
            task, report = race_of(raced, Path(folder, str(at)), options.threads, options.targets)
            lines += lines_of(raced, report)
            wanted = f"(wanted with VNNI: {raced.wanted:g})"
            used = f"{report.seconds:.0f} s"
            summary.append(
                f"- {raced.name}: {report.ratio:.2f} times as fast {wanted}, {report.winner or 'unchanged'}; {used}"
            )
            if raced.held_out is not None:
                summary.append(f"- {accuracy_of(task, report, raced)}")
            print(summary[-1], flush=True)
    device = find_device("cpu")
    table = [f"| {' | '.join(HEADS)} |", "|" + "---|" * len(HEADS), *lines]
    machine = f"{device.name}, {', '.join(device.features)}; {options.threads} thread"
    head = f"{machine}; {time.strftime('%Y-%m-%d')}:"
    text = "\n".join([head, "", *summary])
    print("\n".join([text, "", *table]))
    if options.write:
        page = PAGE.read_text()
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
