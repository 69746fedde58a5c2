"""Which row of a race wins, and what becomes of the others."""

from __future__ import annotations

import pytest

from millstream.plugins.compile.race.report import RaceReport, Row
from millstream.plugins.compile.worker.driver import _mean, _winner


def row(key: str, ratio: float | None, why: str = "", *, lossy: bool = False, single: bool = False) -> Row:
    fields = {"target": key, "candidate": key, "verdict": "lost", "why": why, "lossy": lossy, "single": single}
    return Row.model_validate({**fields, "ratio": ratio})


@pytest.mark.parametrize(
    ("rows", "winner"),
    [
        ([row("a", 1.2), row("b", 1.5)], "b"),
        ([row("a", 1.2), row("b", 1.5, "gains less than 5 %")], "a"),
        ([row("a", 1.5), row("b", 1.55, lossy=True)], "a"),
        ([row("a", 1.5), row("b", 1.6, lossy=True)], "b"),
        ([row("a", 1.02, "gains less than 5 %"), row("b", 1.06, lossy=True)], "b"),
        ([row("a", 1.01, "gains less than 5 %")], None),
        ([row("a", None)], None),
        ([], None),
    ],
)
def test_the_fastest_wins_and_a_lossy_one_only_if_it_gains_more(rows: list[Row], winner: str | None) -> None:
    found, why = _winner(rows)
    assert (found.candidate if found is not None else None) == winner
    assert why
    assert [one.candidate for one in rows if one.verdict == "won"] == ([winner] if winner else [])
    assert all(one.why for one in rows if one.ratio is not None)
    assert RaceReport.model_validate_json(RaceReport(rows=tuple(rows)).model_dump_json()).rows == tuple(rows)


def test_sizes_that_a_form_does_not_run_count_as_the_baseline() -> None:
    assert _mean({1: 2.0, 4: 2.0, 16: 2.0}, (1, 4, 16)) == pytest.approx(2.0)
    assert _mean({1: 8.0}, (1, 4, 16)) == pytest.approx(2.0)
