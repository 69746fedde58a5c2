"""Trace and log settings through one gateway of two: they hold in both, at once, and do what they say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import tritonclient.http

from tests.kit import models, v2
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.wait import wait_until

OFF = {"trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0", "trace_mode": "triton"}
POINTS = [
    "REQUEST_START",
    "QUEUE_START",
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "COMPUTE_END",
    "REQUEST_END",
]
LOGS = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("trace")
    with running_stack(home, gateways=2, settings={"open_control": True}) as stack:
        stack.push("m", models.add_sub(home / "m.onnx"))
        stack.push("n", models.add_sub(home / "m.onnx"))
        yield stack


@pytest.fixture
def stack(traced: Stack) -> Iterator[Stack]:
    yield traced
    for path in ("/v2/models/m/trace/setting", "/v2/models/n/trace/setting", "/v2/trace/setting"):
        cleared = traced.http.post(path, json=CLEAR)
        assert cleared.status_code == 200, cleared.text
    assert traced.http.post("/v2/logging", json={k: v for k, v in LOGS.items() if k != "log_file"}).json() == LOGS
    assert_quiet(traced)


CLEAR = dict.fromkeys(("trace_level", "trace_rate", "trace_count", "log_frequency"))


def file_of(stack: Stack) -> Path:
    return Path(str(stack.http.get("/v2/trace/setting").json()["trace_file"]))


def infer(http: httpx2.Client, model: str, value: float = 1, name: str = "") -> None:
    ones = np.full((1, 4), value, np.float32)
    body, headers = v2.request({"a": ones, "b": ones}, id=name)
    assert http.post(f"/v2/models/{model}/infer", content=body, headers=headers).status_code == 200


def traces(path: Path, number: int) -> dict[int, list[dict[str, Any]]]:
    """The entries of a file by trace, once there are so many traces in it."""

    def read() -> dict[int, list[dict[str, Any]]] | None:
        found: dict[int, list[dict[str, Any]]] = {}
        try:
            entries = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError):  # it is empty until its first traces are written
            return None
        for entry in entries:
            found.setdefault(entry["id"], []).append(entry)
        return found if len(found) >= number else None

    found = wait_until(read, what=f"{number} traces in {path}")
    assert len(found) == number
    return found


def set_in_all(stack: Stack, path: str, values: dict[str, Any]) -> None:
    """Through gateway 0; gateway 1 follows."""
    with stack.gateway(0) as first:
        reply = first.post(path, json=values)
        assert reply.status_code == 200, reply.text
    with stack.gateway(1) as second:
        assert second.get(path).json() == reply.json()


def test_every_third_request_is_traced_until_the_count_is_used_up(stack: Stack) -> None:
    path = file_of(stack)
    with stack.gateway(0) as gateway:
        # of one gateway: each of them counts its own requests, so both together could have traced two more
        values = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "3", "trace_count": "4"}
        assert gateway.post("/v2/models/m/trace/setting", json=values).json() | {"trace_file": ""} == {
            **OFF,
            **values,
            "trace_file": "",
        }
        for number in range(1, 31):
            infer(gateway, "m", number, f"r{number}")
            infer(gateway, "n")
        assert gateway.get("/v2/models/m/trace/setting").json()["trace_count"] == "0"
        assert gateway.get("/v2/models/n/trace/setting").json()["trace_level"] == ["OFF"]
    found = traces(path, 4)
    for number, (trace, entries) in zip((3, 6, 9, 12), found.items(), strict=True):
        head, times, *tensors = entries
        assert head == {"id": trace, "model_name": "m", "model_version": 1, "request_id": f"r{number}"}
        assert [point["name"] for point in times["timestamps"]] == POINTS
        at = [point["ns"] for point in times["timestamps"]]
        assert at == sorted(at) and at[-1] > at[0] > 0
        text = ",".join([f"{number}.0"] * 4)
        assert [(entry["activity"], entry["tensor"]["name"]) for entry in tensors] == [
            ("TENSOR_QUEUE_INPUT", "a"),
            ("TENSOR_QUEUE_INPUT", "b"),
            ("TENSOR_BACKEND_OUTPUT", "sum"),
            ("TENSOR_BACKEND_OUTPUT", "difference"),
        ]
        assert tensors[0]["tensor"] == {"name": "a", "data": text, "shape": "1,4", "dtype": "FP32"}
        assert tensors[2]["tensor"]["data"] == ",".join([f"{2.0 * number}"] * 4)
    path.unlink()


def test_a_request_that_runs_in_parts_is_one_trace(stack: Stack) -> None:
    path = file_of(stack)
    rows = np.arange(800, dtype=np.float32).reshape(200, 4)
    body, headers = v2.request({"a": rows, "b": rows}, id="parts")
    with stack.gateway(0) as gateway:
        settings = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "1", "trace_count": "2"}
        assert gateway.post("/v2/models/m/trace/setting", json=settings).status_code == 200
        assert gateway.post("/v2/models/m/infer", content=body, headers=headers).status_code == 200
        infer(gateway, "m", name="next")
    first, second = traces(path, 2).values()
    assert [first[0]["request_id"], second[0]["request_id"]] == ["parts", "next"]
    at = [point["ns"] for point in first[1]["timestamps"]]
    assert at == sorted(at)
    assert {entry["tensor"]["shape"] for entry in first[2:]} == {"200,4"}
    assert first[4]["tensor"]["data"] == ",".join(map(str, (2 * rows).ravel().tolist()))
    path.unlink()


def test_global_settings_hold_for_all_models_in_all_gateways_and_files_have_an_index(stack: Stack) -> None:
    path = file_of(stack)
    set_in_all(stack, "/v2/trace/setting", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "log_frequency": "2"})
    set_in_all(stack, "/v2/models/n/trace/setting", {"trace_level": ["OFF"]})
    for number in range(2):
        with stack.gateway(number) as gateway:
            wait_until(partial(_traces_now, gateway, path, number), what="tracing")
    names = sorted(path.parent.glob("trace.json.*"))
    assert len(names) >= 2
    for name in names:
        found = traces(name, 2)
        assert {entries[0]["model_name"] for entries in found.values()} == {"m"}
        assert all(len(entries) == 2 for entries in found.values())  # no tensors
    assert not path.exists()


def _traces_now(gateway: httpx2.Client, path: Path, before: int) -> bool:
    """Whether a gateway, asked twice, makes a file of two traces."""
    infer(gateway, "m")
    infer(gateway, "m")
    infer(gateway, "n")
    return len(list(path.parent.glob("trace.json.*"))) > before


def test_a_models_own_value_can_be_cleared_and_mistakes_are_told(stack: Stack) -> None:
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{stack.port}")
    try:
        client.update_trace_settings("m", {"trace_rate": "7", "trace_level": ["TENSORS"]})
        client.update_trace_settings(None, {"trace_rate": "9"})
        assert client.get_trace_settings("m")["trace_rate"] == "7"
        client.update_trace_settings("m", {"trace_rate": None})
        assert client.get_trace_settings("m")["trace_rate"] == "9"
        client.update_trace_settings(None, {"trace_rate": None})
        assert client.get_trace_settings()["trace_rate"] == "1000"
    finally:
        client.close()
    for values, status, told in (
        ({"trace_file": "/etc/passwd"}, 501, "trace file location can not be updated through network protocol"),
        ({"trace_mode": "opentelemetry"}, 501, "trace mode can not be updated through network protocol"),
        ({"trace_level": ["MOST"]}, 400, "unknown trace level 'MOST'; known: OFF, TIMESTAMPS, TENSORS"),
        ({"trace_level": ["OFF", "TENSORS"]}, 400, "trace_level is OFF alone, or one or more of the others"),
        ({"trace_level": []}, 400, "trace_level is OFF alone, or one or more of the others"),
        ({"trace_rate": "x"}, 400, "trace setting 'trace_rate' must be a number, got: x"),
        ({"trace_rate": "0"}, 400, "at least 1"),
        ({"trace_rate": "9" * 5000}, 400, "at most"),
        ({"trace_count": {}}, 400, "must be a number"),
        ({"other": 1}, 400, "unknown trace setting 'other'"),
    ):
        reply = stack.http.post("/v2/trace/setting", json=values)
        assert (reply.status_code, told in reply.json()["error"]) == (status, True), reply.text
    for path in ("/v2/models/nope/trace/setting",):
        assert stack.http.get(path).json() == {"error": "Request for unknown model : nope"}
        assert stack.http.post(path, json={}).status_code == 400
    assert stack.http.post("/v2/trace/setting", content=b"[").status_code == 400
    assert stack.http.post("/v2/trace/setting", content=b" " * 100_000).status_code == 413
    abroad = {"Origin": "http://elsewhere.example", "Authorization": ""}  # a right key would pass
    for path in ("/v2/trace/setting", "/v2/logging", "/v2/models/m/trace/setting"):
        assert stack.http.post(path, json={}, headers=abroad).status_code == 403


def test_levels_and_format_of_the_log_change_in_every_gateway(stack: Stack, tmp_path: Path) -> None:
    logs = [stack.home / "logs" / f"gateway-{index}.log" for index in range(2)]

    def said(name: str) -> list[str | None]:
        """The line of each gateway's log about a version of that model that is new to it."""
        texts = [path.read_text() for path in logs]
        return [next((line for line in text.splitlines() if f"lane opened: {name}:" in line), None) for text in texts]

    stack.push("quiet", models.add_sub(tmp_path / "m.onnx"))
    assert said("quiet") == [None, None]
    assert stack.http.get("/v2/logging").json() == LOGS
    set_in_all(stack, "/v2/logging", {"log_verbose_level": 1, "log_format": "ISO8601"})
    stack.push("loud", models.add_sub(tmp_path / "m.onnx"))
    wait_until(lambda: all(said("loud")))
    for line in said("loud"):
        assert re.fullmatch(
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z DEBUG millstream\.router: lane opened: loud:1:\w+, pool cpu"
            r"( \(request [\w-]+\))?",  # absent in the gateway that heard of the version from another one
            str(line),
        )
    set_in_all(stack, "/v2/logging", {"log_verbose_level": 0, "log_format": "default"})
    for values, status, told in (
        ({"log_file": "x"}, 501, "log file location can not be updated through network protocol"),
        ({"log_format": "xml"}, 400, "invalid argument for --log_format, got: xml"),
        ({"log_info": "yes"}, 400, "log setting 'log_info' must be true or false"),
        ({"log_verbose_level": -1}, 400, "must be an integer, at least 0"),
        ({"log_warnings": True}, 400, "unknown log setting 'log_warnings'"),
    ):
        reply = stack.http.post("/v2/logging", json=values)
        assert (reply.status_code, told in reply.json()["error"]) == (status, True), reply.text
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{stack.port}")
    try:
        assert client.update_log_settings({"log_info": False})["log_info"] is False
        assert client.get_log_settings()["log_info"] is False
    finally:
        client.close()
