"""Triton's statistics and metrics: what they say after known traffic over all gateways, to the last request."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import tritonclient.http
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.kit import models, v2
from tests.kit.metrics import Page
from tests.kit.stack import Stack, assert_quiet, running_stack, sigstopped
from tests.kit.wait import wait_until

GATEWAYS = 2
REQUESTS = 2000
CALLERS = 8
BAD = 99  # an index that the model fails on
DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("statistics"), gateways=GATEWAYS, pools="cpu=2") as stack:
        yield stack


@pytest.fixture
def stack(counting: Stack) -> Iterator[Stack]:
    yield counting
    assert_quiet(counting)


def stats(http: httpx2.Client, model: str) -> dict[str, Any]:
    reply = http.get(f"/v2/models/{model}/versions/1/stats")
    assert reply.status_code == 200, reply.text
    [document] = reply.json()["model_stats"]
    return dict(document)


def triton_metrics(stack: Stack) -> Page:
    """The page; the parser would add _total to the names of counters that have none."""
    return Page(re.sub(r"(# TYPE nv_\w+) counter", r"\1 untyped", stack.metrics().text))


def counts(document: dict[str, Any]) -> dict[str, int]:
    return {name: document["inference_stats"][name]["count"] for name in DURATIONS}


def test_every_field_is_there_with_zero_from_load_and_canaries_count_nowhere(stack: Stack, tmp_path: Path) -> None:
    stack.push("fresh", models.failing(tmp_path / "m.onnx"))
    batches = stack.metrics().value("millstream_batches_total", model="fresh")
    wait_until(
        lambda: stack.metrics().value("millstream_batches_total", model="fresh") > batches, what="a readiness probe"
    )
    document = stats(stack.http, "fresh")
    memory = document.pop("memory_usage")
    assert document == {
        "name": "fresh",
        "version": "1",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": {name: {"count": 0, "ns": 0} for name in DURATIONS},
        "response_stats": {},
        "batch_stats": [],
    }
    assert [(entry["type"], entry["id"], entry["byte_size"] > 0) for entry in memory] == [("CPU", 0, True)]
    page = triton_metrics(stack)
    names = {name for name, _ in page.series() if name.startswith("nv_inference")}
    assert names == {
        "nv_inference_request_success",
        "nv_inference_request_failure",
        "nv_inference_count",
        "nv_inference_exec_count",
        "nv_inference_pending_request_count",
        *(f"nv_inference_{what}_duration_us" for what in ("request", "queue")),
        *(f"nv_inference_compute_{what}_duration_us" for what in ("input", "infer", "output")),
    }
    failures = [s for s in page.samples if s.name == "nv_inference_request_failure" and s.labels["model"] == "fresh"]
    assert {(s.labels["reason"], s.value) for s in failures} == {
        (reason, 0) for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    }
    assert page.value("nv_cpu_memory_total_bytes") > page.value("nv_cpu_memory_used_bytes") > 0
    assert 0 <= page.value("nv_cpu_utilization") <= 1


def test_two_thousand_mixed_requests_add_up_exactly(stack: Stack, tmp_path: Path) -> None:
    stack.push("mixed", models.failing(tmp_path / "m.onnx"))
    rng = np.random.default_rng(11)
    outcomes: Counter[str] = Counter()

    def send(client: httpx2.Client, requests: list[tuple[str, int]]) -> None:
        for kind, rows in requests:
            body, headers = v2.request({"index": np.ones((rows, 1), np.int64) * (BAD if kind == "bad" else 1)})
            if kind == "broken":
                body, headers = b'{"inputs":[]}', {}
            status = client.post("/v2/models/mixed/infer", content=body, headers=headers).status_code
            assert status == {"good": 200, "bad": 500, "broken": 400}[kind]

    plan: list[tuple[str, int]] = []
    for _ in range(REQUESTS):
        kind = str(rng.choice(["good", "good", "good", "good", "good", "good", "good", "good", "bad", "broken"]))
        rows = int(rng.integers(1, 9))
        plan.append((kind, rows))
        outcomes[kind] += 1
        outcomes["rows"] += rows if kind == "good" else 0
    with ExitStack() as connected, ThreadPoolExecutor(CALLERS) as pool:
        callers = [connected.enter_context(stack.gateway(at % GATEWAYS)) for at in range(CALLERS)]
        for part in [pool.submit(send, caller, plan[at::CALLERS]) for at, caller in enumerate(callers)]:
            part.result()
        seen = [stats(caller, "mixed") for caller in callers[:GATEWAYS]]
    for document in seen:
        document.pop("memory_usage")  # workers measure it again and again
    assert seen[0] == seen[1]
    one = seen[0]
    failed = outcomes["bad"] + outcomes["broken"]
    ran = {"queue", "success", "compute_input", "compute_infer", "compute_output"}
    assert counts(one) == {name: outcomes["good"] if name in ran else 0 for name in DURATIONS} | {"fail": failed}
    assert one["inference_count"] == outcomes["rows"]
    assert sum(batch["compute_infer"]["count"] for batch in one["batch_stats"]) == one["execution_count"]
    by_size = sum(batch["batch_size"] * batch["compute_infer"]["count"] for batch in one["batch_stats"])
    assert by_size == one["inference_count"]
    ns = {name: one["inference_stats"][name]["ns"] for name in DURATIONS}
    assert ns["success"] > ns["queue"] + ns["compute_infer"] > ns["compute_infer"] > 0
    assert min(ns["compute_input"], ns["compute_output"], ns["fail"]) > 0
    page = triton_metrics(stack)
    assert page.value("nv_inference_request_success", model="mixed") == outcomes["good"]
    assert page.value("nv_inference_count", model="mixed") == outcomes["rows"]
    assert page.value("nv_inference_exec_count", model="mixed") == one["execution_count"]
    assert page.value("nv_inference_request_failure", model="mixed", reason="BACKEND") == outcomes["bad"]
    assert page.value("nv_inference_request_failure", model="mixed", reason="OTHER") == outcomes["broken"]
    assert page.value("nv_inference_request_duration_us", model="mixed") == pytest.approx(ns["success"] / 1000)
    assert page.value("nv_inference_pending_request_count", model="mixed") == 0


def test_runs_that_were_merged_count_once_and_a_restart_loses_nothing(stack: Stack, tmp_path: Path) -> None:
    stack.push("busy", models.slow(tmp_path / "m.onnx", rounds=2000))
    body, headers = v2.request({"x": np.ones((1, 128), np.float32)}, parameters={"timeout": 600_000_000})
    gateways = [pid for name, pid in stack.pids().items() if name.startswith("gateway-")]
    with sigstopped(*gateways):  # they find all of them at once, however long it takes to send them
        sent = [stack.send("/v2/models/busy/infer", body, headers) for _ in range(40)]
    for connection in sent:
        assert connection.getresponse().status == 200
        connection.close()
    before = stats(stack.http, "busy")
    assert (before["inference_count"], counts(before)["success"]) == (40, 40)
    assert before["execution_count"] < 40
    assert sum(batch["compute_infer"]["count"] for batch in before["batch_stats"]) == before["execution_count"]
    pids = stack.pids()
    for name in ("gateway-0", "gateway-1", "cpu-0"):
        os.kill(pids[name], signal.SIGKILL)
        stack.wait_for_line(f"{name} was ended by SIGKILL")
    stack.reconnect()

    def after() -> dict[str, Any] | None:
        with suppress(httpx2.TransportError):
            [document] = stack.http.get("/v2/models/busy/stats").json().get("model_stats", [None])
            return dict(document) if document else None
        return None

    found = wait_until(after, what="a gateway that knows the model")
    names = ("inference_count", "execution_count", "last_inference")
    assert [found[name] for name in names] == [before[name] for name in names]
    stack.settled("busy", 1)


def test_clients_read_statistics_and_mistakes_are_told(stack: Stack, tmp_path: Path) -> None:
    stack.push("read", models.add_sub(tmp_path / "m.onnx"))
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{stack.port}")
    try:
        assert [entry["name"] for entry in client.get_inference_statistics("read")["model_stats"]] == ["read"]
        names = [entry["name"] for entry in client.get_inference_statistics()["model_stats"]]
        assert names == sorted(names) and "read" in names
    finally:
        client.close()
    for path, status, text in (
        ("nope/stats", 400, "requested model 'nope' is not available"),
        ("read/versions/7/stats", 400, "requested model 'read' version 7 is not available"),
        ("read/versions/x/stats", 404, "Not Found; a version is a whole number, not 'x'"),
    ):
        reply = stack.http.get(f"/v2/models/{path}")
        assert (reply.status_code, reply.json()) == (status, {"error": text})


def test_openmetrics_names_are_the_same(stack: Stack) -> None:
    reply = stack.http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    families = {family.name: family for family in text_string_to_metric_families(reply.text)}
    assert families["nv_inference_count"].type == "unknown"
    assert {sample.name for sample in families["nv_inference_count"].samples} == {"nv_inference_count"}
    plain = stack.http.get("/metrics").text
    assert "# TYPE nv_inference_count counter\n" in plain
