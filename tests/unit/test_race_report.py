"""plugins/compile/race: report, Markdown and plot."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from pydantic import ValidationError

from millstream.plugins.compile.candidate import Compiled
from millstream.plugins.compile.race.markdown import markdown_of, size_text, table_of
from millstream.plugins.compile.race.plot import pareto_front, plot_of, points_of
from millstream.plugins.compile.race.report import BASELINE, OutputFigures, RaceReport, Row, variant_for

COMPILED = Compiled(files=("model.onnx",), backend="onnxruntime", runtime="onnxruntime 1.31.1")


def row(key: str, ratio: float | None, cosine: float | None, **more: object) -> Row:
    fields = {"target": key, "candidate": key, "verdict": "lost", "ratio": ratio, "cosine_min": cosine, **more}
    if ratio is not None:
        fields |= {"ratio_low": ratio * 0.9, "ratio_high": ratio * 1.1, "ratios": {1: (ratio, ratio, ratio)}}
    return Row.model_validate(fields)


REPORT = RaceReport(
    model="m",
    version=3,
    baseline="onnxruntime, 2 threads",
    winner="int8",
    why="it gains 200 %",
    ratio=3.0,
    table={1: "int8", 16: BASELINE},
    rows=(
        row("int8", 3.0, 0.9995, verdict="won", compiled=COMPILED),
        row("bf16", 2.0, 0.99999),
        row("slow", 0.5, 0.9999),
        row("bad|<b>", 4.0, 0.5, verdict="inaccurate", outputs={"y": OutputFigures(cosine=0.5, why="cosine\n0.5")}),
        row("broken", None, None, verdict="failed", why="it\ncrashed"),
    ),
    weights={1: 0.5, 16: 0.5},
    baseline_s={1: 0.01, 16: 0.1},
    samples="random",
)


def test_a_report_survives_its_json_form() -> None:
    assert RaceReport.model_validate_json(REPORT.model_dump_json()) == REPORT


@pytest.mark.parametrize("wrong", [{"winner": "other"}, {"table": {1: "broken"}}, {"winner": "slow"}])
def test_a_winner_that_was_not_compiled_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="is no candidate of this race that was compiled"):
        RaceReport.model_validate({**REPORT.model_dump(), **wrong})


def test_a_batch_runs_on_the_variant_of_the_next_measured_size() -> None:
    assert [variant_for(REPORT.table, rows) for rows in (1, 2, 16, 64)] == ["int8", BASELINE, BASELINE, BASELINE]
    assert variant_for({}, 4) == BASELINE


def test_markdown_has_one_line_for_each_candidate_the_losers_included() -> None:
    text = markdown_of(REPORT)
    lines = table_of(REPORT)
    assert len(lines) == 2 + 1 + len(REPORT.rows)  # heads, baseline
    assert {line.count(" |") for line in lines[2:]} == {10}
    assert "bad\\|&lt;b>" in text
    assert "it crashed" in text
    assert "**int8** wins: 3.00 times as fast as onnxruntime, 2 threads, by batch size (1: int8, 16: baseline)." in text


def test_without_a_winner_the_report_says_why() -> None:
    unchanged = REPORT.model_copy(update={"winner": None, "table": {}, "why": "the fastest gains 2 %"})
    assert "Nothing changes: the fastest gains 2 %." in markdown_of(unchanged)


def test_the_plot_marks_the_pareto_front_and_is_valid_xml() -> None:
    points = points_of(REPORT)
    assert [point.name for point in pareto_front(points)] == ["bad|<b>", "int8", "bf16", REPORT.baseline]
    circles = list(ET.fromstring(plot_of(REPORT)).iter("{http://www.w3.org/2000/svg}circle"))
    assert len(circles) == len(points) == 5
    assert sum("stroke" in circle.attrib for circle in circles) == 4


def test_a_plot_of_nothing_but_the_baseline_is_drawn() -> None:
    ET.fromstring(plot_of(REPORT.model_copy(update={"rows": ()})))


def test_sizes_have_units() -> None:
    sizes = (0, 1023, 2048, 15 << 20, 3 << 40)
    assert [size_text(size) for size in sizes] == ["0 B", "1023 B", "2.0 KiB", "15 MiB", "3072 GiB"]
