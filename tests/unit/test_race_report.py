"""plugins/compile/race: the report."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from millstream.plugins.compile.candidate import Compiled
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
