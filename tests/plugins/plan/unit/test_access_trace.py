"""The calls of a simulation from access logs: their models, their instants, and what is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.gateway.observing.access_log import json_text, text_line
from millstream.gateway.observing.finished import Finished, Run
from millstream.plugins.plan.access_trace import LoggedCall, calls_of, is_access_log, log_files, trace_of

BEGAN = 1_700_000_000.0  # Unix time at which the clock of the requests was 0
LINES: list[Callable[[Finished, float], str]] = [text_line, json_text("gateway-0")]


def request(
    path: str, status: int, at_s: float, *, run: tuple[str, str] | None = None, protocol: str = "http"
) -> Finished:
    """A request that came at `at_s` and was answered 1.5 s later. `run`: the model and version that ran, if one did."""
    runs = () if run is None else (Run(run[0], run[1], "cpu", "v2", 4, at_s, None),)
    method = "POST" if protocol == "http" else "ModelInfer"
    return Finished(protocol, method, path, path, status, at_s, at_s + 1.5, "r", 0, "127.0.0.1", 87, "team", runs)


def read(line: Callable[[Finished, float], str], *requests: Finished) -> list[LoggedCall]:
    return list(calls_of(line(one, BEGAN) for one in requests))


@pytest.mark.parametrize("line", LINES)
def test_a_call_came_its_duration_before_its_line(line: Callable[[Finished, float], str]) -> None:
    [call] = read(line, request("/v2/models/m/infer", 200, 10.0, run=("m", "2")))
    assert (call.model, call.version) == ("m", 2)
    assert call.at_s == pytest.approx(BEGAN + 10.0, abs=0.001)
    [call] = read(line, request("/inference.GRPCInferenceService/ModelInfer", 0, 3.0, run=("g", "1"), protocol="grpc"))
    assert (call.model, call.version) == ("g", 1)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(
    ("path", "status", "call"),
    [
        ("/v2/models/cold/infer", 429, ("cold", 0)),
        ("/v2/models/a%20b/versions/3/infer", 503, ("a b", 3)),
        ("/v1/models/cold:predict", 504, ("cold", 0)),
        ("/v1/models/cold/versions/7:predict", 503, ("cold", 7)),
        ("/v2/models/cold/infer", 400, None),
        ("/v2/models/cold/ready", 503, None),
        ("/admin/v1/models", 503, None),
        ("/v2/models/cold/infer", 404, None),
    ],
)
def test_a_refused_call_is_of_the_model_of_its_path(
    line: Callable[[Finished, float], str], path: str, status: int, call: tuple[str, int] | None
) -> None:
    found = read(line, request(path, status, 1.0))
    assert [(one.model, one.version) for one in found] == ([] if call is None else [call])


def test_lines_that_are_none_are_left_out() -> None:
    others = [
        "",
        "2026-11-23 01:15:42,123 INFO millstream.lanes: m version 1 is served",
        "Traceback (most recent call last):",
        '{"time": "2026-11-23T01:15:42Z", "logger": "millstream.lanes", "message": "x"}',
        '{"time": "2026-11-23T01:15:42Z", "logger": "millstream.access", "model": "m", "fields": {"duration_ms": []}}',
        '{"time": 1, "logger": "millstream.access"',
        "[" * 100_000,
    ]
    assert list(calls_of(others)) == []
    assert not is_access_log(others[:4])
    assert is_access_log([*others[:4], text_line(request("/v2/models/m/infer", 200, 1.0), BEGAN)])
    assert not is_access_log(["model,seconds", "m,1"])


def test_a_trace_begins_with_its_first_call_and_names_versions_as_plans_do() -> None:
    calls = [
        LoggedCall("m", 2, 107.0),
        LoggedCall("m", 1, 100.0),
        LoggedCall("n", 4, 103.5),
        LoggedCall("gone", 1, 1.0),
    ]
    logged = trace_of(calls, ["m", "n", "m:1"])
    assert logged.trace.seconds.tolist() == [0.0, 3.5, 7.0]
    assert logged.trace.models.tolist() == [2, 1, 0]
    assert (logged.trace.end_s, logged.left_out) == (7.0, 1)
    with pytest.raises(ValueError, match="none of its calls, 4, is to one of the models"):
        trace_of(calls, ["other"])


def test_the_logs_of_a_home_are_those_of_its_gateways_also_rotated_ones(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in (
        "gateway-0-access.log",
        "gateway-0-access.log.1",
        "gateway-1-access.log",
        "gateway-0.log",
        "cpu-0.log",
    ):
        (logs / name).touch()
    expected = ["gateway-0-access.log", "gateway-0-access.log.1", "gateway-1-access.log"]
    assert [path.name for path in log_files(tmp_path)] == [path.name for path in log_files(logs)] == expected
    assert log_files(logs / "cpu-0.log") == [logs / "cpu-0.log"]
