"""A race report as Markdown: the verdict, a table with the losers, accuracy by output, how to repeat a row. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millstream.plugins.compile.race.report import BASELINE, OutputFigures, RaceReport, Row

_WHY_CHARACTERS_MAX = 200
_UNITS = ("B", "KiB", "MiB", "GiB")


def markdown_of(report: RaceReport) -> str:
    """Return the whole report; it ends with a newline."""
    parts = [[f"# Race of {report.model} version {report.version}", "", verdict_of(report), "", *_facts(report)]]
    parts.append(table_of(report))
    if outputs := _outputs(report.rows):
        parts.append(["Accuracy by output, against the baseline:", "", *outputs])
    if report.notes:
        parts.append([f"- {note}" for note in report.notes])
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def verdict_of(report: RaceReport) -> str:
    """Return one sentence: who won, and by how much."""
    if report.winner is None:
        return f"Nothing changes: {report.why or 'no candidate won'}."
    gain = f"**{report.winner}** wins: {report.ratio:.2f} times as fast as {report.baseline}"
    if len(set(report.table.values())) == 1:
        return f"{gain}."
    entries = ", ".join(f"{rows}: {key}" for rows, key in sorted(report.table.items()))
    return f"{gain}, by batch size ({entries})."


def table_of(report: RaceReport) -> list[str]:
    """Return the table of all candidates, one a line, without the figures that differ from run to run."""
    sizes = sorted(report.weights)
    heads = ["candidate", "verdict", "times as fast (95 %)", *(f"{rows} rows" for rows in sizes)]
    heads += ["cosine", "arg-max", "compile s", "size", "why"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    if report.baseline_s:
        ones = ["1" for _ in sizes]
        lines.append(f"| {_cell(report.baseline)} | {BASELINE} | 1 | {' | '.join(ones)} | | | | | |")
    return lines + [f"| {' | '.join(_cells(row, sizes))} |" for row in report.rows]


def size_text(size_bytes: int) -> str:
    """Return a size with a unit."""
    size, units = float(size_bytes), list(_UNITS)
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if size >= 10 or units[0] == "B" else f"{size:.1f} {units[0]}"


def _facts(report: RaceReport) -> list[str]:
    weights = ", ".join(f"{rows} rows {weight:.0%}" for rows, weight in sorted(report.weights.items()))
    facts = [
        f"- baseline: {report.baseline}",
        f"- batch sizes by their share of the runs: {weights or 'none'}",
        f"- samples: {report.samples}",
        f"- device: {report.device}" + (f" ({report.fingerprint})" if report.fingerprint else ""),
        f"- seconds: {report.seconds:.0f} of {report.seconds_max:.0f}; seed {report.seed}",
    ]
    if report.runtimes:
        facts.append("- libraries: " + ", ".join(f"{name} {version}" for name, version in report.runtimes.items()))
    return facts


def _cells(row: Row, sizes: Sequence[int]) -> list[str]:
    interval = "" if row.ratio_low is None or row.ratio_high is None else f" ({row.ratio_low:.2f}–{row.ratio_high:.2f})"
    return [
        _cell(row.candidate),
        row.verdict,
        "" if row.ratio is None else f"{row.ratio:.2f}{interval}",
        *("{:.2f} ({:.2f}–{:.2f})".format(*row.ratios[rows]) if rows in row.ratios else "" for rows in sizes),
        _figure(row.cosine_min, 5),
        _figure(row.agreement_min, 3),
        f"{row.compile_s:.1f}" + (" (cached)" if row.cached else ""),
        size_text(row.size_bytes) if row.size_bytes else "",
        _cell(row.why),
    ]


def _outputs(rows: Iterable[Row]) -> list[str]:
    lines = [
        f"| {_cell(row.candidate)} | {_cell(name)} | {_output_cells(figures)} |"
        for row in rows
        for name, figures in row.outputs.items()
    ]
    heads = ("candidate", "output", "cosine", "arg-max", "distance", "largest difference", "equal", "why")
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *lines] if lines else []


def _output_cells(figures: OutputFigures) -> str:
    numbers = (figures.cosine, figures.agreement, figures.distance, figures.max_abs, figures.equal)
    return " | ".join([*(_figure(number, 5) for number in numbers), _cell(figures.why)])


def _figure(number: float | None, digits: int) -> str:
    return "" if number is None else f"{number:.{digits}g}"


def _cell(text: str) -> str:
    """Return text that stays in its cell: names of outputs and messages of libraries may contain anything."""
    line = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return line if len(line) <= _WHY_CHARACTERS_MAX else line[:_WHY_CHARACTERS_MAX] + "…"
