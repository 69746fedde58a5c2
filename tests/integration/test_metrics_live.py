"""Metrics after traffic that is known to the last row, over two gateways and two workers that also die."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest

from millstream.services.metrics.catalogue import CATALOGUE
from tests.kit import models, tools, v2
from tests.kit.metrics import Page
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.wait import wait_until

X = np.ones((3, 2), np.float32)
GATEWAYS = 2


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    # No other traffic: no version is active, so no readiness probe runs. The lease outlasts a worker that a busy
    # machine holds up, whose batches would run twice.
    folder, settings = tmp_path_factory.mktemp("metrics"), {"queue_lease_s": 60}
    with running_stack(folder, gateways=GATEWAYS, pools="cpu=2", settings=settings) as stack:
        yield stack


@pytest.fixture
def stack(counting: Stack) -> Iterator[Stack]:
    yield counting
    assert_quiet(counting)


def push(stack: Stack, tmp_path: Path, name: str) -> str:
    """A version that is not activated; the path of its infer requests."""
    stack.push(name, models.failing(tmp_path / "m.onnx"), version=1, activate=False)
    return f"/v2/models/{name}/versions/1/infer"


def index(*values: int) -> tuple[bytes, dict[str, str]]:
    return v2.request({"index": np.array(values, np.int64).reshape(-1, 1)})


def post(http: httpx2.Client, path: str, *values: int) -> int:
    body, headers = index(*values)
    return http.post(path, content=body, headers=headers).status_code


def test_every_request_and_row_is_counted_once(stack: Stack, tmp_path: Path) -> None:
    path = push(stack, tmp_path, "counted")
    rows = 0
    for number in range(GATEWAYS):
        with stack.gateway(number) as gateway:
            for size in range(1, 21):
                assert post(gateway, path, *range(-4, -4 + size % 8 + 1)) == 200
                rows += size % 8 + 1
            assert post(gateway, path, 99) == 500
            body, headers = v2.request({"index": np.ones((1, 1), np.int64)}, parameters={"timeout": 1})
            assert gateway.post(path, content=body, headers=headers).status_code == 504
            for wrong in (b"", b"{}", b"x"):
                assert gateway.post(path, content=wrong).status_code == 400
    # what ran: all but the expired; a worker counts when its reply is on its way
    wait_until(lambda: _ran(stack) == (20 * GATEWAYS + GATEWAYS, rows + GATEWAYS), what="each row ran once")
    page = stack.metrics()
    labels = {"model": "counted", "version": "1"}
    outcomes = {
        outcome: page.value("millstream_requests_total", outcome=outcome, **labels)
        for outcome in page.label_values("outcome")
        if page.value("millstream_requests_total", outcome=outcome, **labels)
    }
    answered = {"ok": 20.0 * GATEWAYS, "model": 1.0 * GATEWAYS, "expired": 1.0 * GATEWAYS}
    assert outcomes == answered | {"invalid": 3.0 * GATEWAYS}
    seconds = "millstream_request_duration_seconds"
    assert page.value(f"{seconds}_count", **labels) == sum(answered.values())
    assert page.value(f"{seconds}_bucket", le="+Inf", **labels) == sum(answered.values())
    assert page.value("millstream_requests_total", model="counted") == sum(outcomes.values())
    batches = page.value("millstream_batches_total", **labels)
    assert page.value("millstream_batches_total", outcome="failed", **labels) >= GATEWAYS
    assert page.value("millstream_execution_duration_seconds_count", **labels) <= batches


def _ran(stack: Stack) -> tuple[float, float]:
    """The runs, and the rows of all of them."""
    page = stack.metrics()
    names = ("millstream_batch_rows_count", "millstream_batch_rows_sum")
    runs, rows = (page.value(name, model="counted") for name in names)
    return runs, rows


def test_every_gateway_gives_the_same_page(stack: Stack, tmp_path: Path) -> None:
    path = push(stack, tmp_path, "same")
    for number in range(GATEWAYS):
        with stack.gateway(number) as gateway:
            assert post(gateway, path, 1, 2) == 200
    assert_quiet(stack)

    def pages() -> list[Page] | None:
        """One of each gateway, if nothing was counted between them."""
        before = stack.metrics()
        found = []
        for number in range(GATEWAYS):
            with stack.gateway(number) as gateway:
                found.append(Page(gateway.get("/metrics").text))
        after = stack.metrics()
        still = before.series() == after.series() and all(before.value(name) == after.value(name) for name in compared)
        return found if still else None

    compared = ("millstream_requests_total", "millstream_batch_rows_sum", "millstream_segment_in_use_bytes")
    first, second = wait_until(pages, what="a moment in which nothing is counted")
    assert first.series() == second.series()
    for name in compared:
        assert first.value(name) == second.value(name)
    assert first.value("millstream_requests_total", model="same") == GATEWAYS
    wait_until(lambda: stack.metrics().value("millstream_instances_ready", model="same") == 2)


def test_the_series_of_a_deleted_model_leave_every_page(stack: Stack, tmp_path: Path) -> None:
    assert post(stack.http, push(stack, tmp_path, "deleted"), 1) == 200
    assert stack.metrics().value("millstream_requests_total", model="deleted") == 1
    assert stack.http.delete("/admin/v1/models/deleted").is_success
    for number in range(GATEWAYS):
        with stack.gateway(number) as gateway:
            wait_until(lambda: 'model="deleted"' not in gateway.get("/metrics").text, what="its series end")


def test_the_page_is_compressed_where_that_is_accepted(stack: Stack) -> None:
    sizes = {}
    for encoding in ("identity", "gzip"):
        with stack.http.stream("GET", "/metrics", headers={"accept-encoding": encoding}) as reply:
            sizes[encoding] = len(b"".join(reply.iter_raw()))
            assert reply.headers.get("content-encoding", "identity") == encoding
    assert sizes["gzip"] < sizes["identity"] / 4
    assert "millstream_requests_total" in stack.http.get("/metrics").text


def test_both_workers_are_counted(stack: Stack, tmp_path: Path) -> None:
    stack.push(
        "both", models.slow(tmp_path / "m.onnx", rounds=5000), version=1, activate=False, config='{"rows_max": 1}'
    )
    body, headers = v2.request({"x": np.ones((1, 128), np.float32)})
    sent = 0

    def busy_s() -> list[float]:
        page = stack.metrics()
        return [page.value("millstream_worker_busy_seconds_total", worker=worker) for worker in ("cpu-0", "cpu-1")]

    def both_ran() -> bool:
        nonlocal sent
        connections = [stack.send("/v2/models/both/versions/1/infer", body, headers) for _ in range(12)]
        sent += len(connections)
        for connection in connections:
            assert connection.getresponse().status == 200
            connection.close()
        return all(busy_s())

    wait_until(both_ran, what="each worker has run some of the requests")
    wait_until(lambda: stack.metrics().value("millstream_batch_rows_count", model="both") == sent)
    page = stack.metrics()
    for worker in ("cpu-0", "cpu-1"):
        assert page.value("millstream_worker_info", worker=worker, pool="cpu", device="cpu") == 1
    busy = page.value("millstream_worker_busy_seconds_total")
    assert busy >= page.value("millstream_execution_duration_seconds_sum", model="both") > 0


def test_what_was_counted_outlives_its_process(stack: Stack, tmp_path: Path) -> None:
    path = push(stack, tmp_path, "lasting")
    for number in range(GATEWAYS):
        with stack.gateway(number) as gateway:
            assert post(gateway, path, 1, 2, 3) == 200
    wait_until(lambda: stack.metrics().value("millstream_batch_rows_sum", model="lasting") == 3 * GATEWAYS)
    assert_quiet(stack)
    before = stack.metrics()
    for name, pid in stack.pids().items():
        if name != "redis":
            os.kill(pid, signal.SIGKILL)
            stack.wait_for_line(f"{name} was ended by SIGKILL")
            wait_until(lambda: stack.pids().get(name, pid) != pid)  # noqa: B023
    stack.reconnect()
    stack.settled("lasting", 1)
    wait_until(lambda: stack.metrics().value("millstream_instances_ready", model="lasting") == 2)
    after = stack.metrics()
    for metric in CATALOGUE:
        if metric.kind.lasting:
            for suffix in ("", "_sum", "_count"):
                name = metric.name + suffix
                assert after.value(name) >= before.value(name), name
    assert after.value("millstream_requests_total", model="lasting") == GATEWAYS
    # neither is there a series for each process that ever was
    workers = {"cpu-0", "cpu-1"}
    assert after.label_values("worker") == workers


def test_callers_cannot_make_series(stack: Stack, tmp_path: Path) -> None:
    path = push(stack, tmp_path, "bounded")
    assert post(stack.http, path, 1) == 200
    assert stack.http.post(path, content=b"x").status_code == 400
    before: set[object] = set()
    for i in range(50):
        if i == 1:  # the first of each kind makes the series of its route and status
            assert_quiet(stack)
            before = set(stack.metrics().series())
        body, headers = index(1)
        for unknown in (f"/v2/models/m{i}/infer", f"/v2/models/bounded/versions/{i + 2}/infer", f"/v2/{i}"):
            assert stack.http.post(unknown, content=body, headers=headers).status_code == 404
        assert stack.http.get(f"/v2/models/m{i}").status_code == 404
        body, headers = v2.request({"index": np.ones((1, 1), np.int64)}, id=f"id{i}", parameters={f"p{i}": i})
        assert stack.http.post(path, content=body, headers=headers).status_code == 200
    assert_quiet(stack)
    # A retry, or a reply by the other way, makes series, too: each call above would make one or more.
    made = stack.metrics().series() - before
    assert len(made) < 25, made


def test_a_model_that_is_gone_leaves_no_gauges(stack: Stack, tmp_path: Path) -> None:
    path = push(stack, tmp_path, "leaving")
    assert post(stack.http, path, 1) == 200
    gauges = ("lane_rows", "instances_ready", "instance_memory_bytes", "stream_entries")

    def shown() -> set[str]:
        series = stack.metrics().series()
        return {gauge for gauge in gauges for name, labels in series
                if name == f"millstream_{gauge}" and ("model", "leaving") in labels}  # fmt: skip

    assert shown() == set(gauges)
    assert stack.http.delete("/admin/v1/models/leaving").status_code == 204
    wait_until(lambda: not shown())


def test_bytes_and_the_release_are_shown(stack: Stack, tmp_path: Path) -> None:
    path = push(stack, tmp_path, "bytes")
    before = stack.metrics()

    def direct() -> bool:
        assert post(stack.http, path, *([1] * 50)) == 200
        page = stack.metrics()
        batches = page.value("millstream_batches_direct_total") > before.value("millstream_batches_direct_total")
        replies = "millstream_batch_replies_total"
        return batches and page.value(replies, way="direct") > before.value(replies, way="direct")

    wait_until(direct, what="a batch and its reply took no queue")
    # The first batch of a gateway took it: no worker was attached to it yet.
    assert stack.metrics().value("millstream_redis_bytes_total", direction="gateway_out") >= 400
    assert stack.metrics().value("millstream_build_info") == 1


@pytest.mark.needs("promtool")
def test_promtool_has_nothing_to_say_but_of_names_that_are_not_ours(stack: Stack, tmp_path: Path) -> None:
    path = push(stack, tmp_path, "checked")
    assert post(stack.http, path, 1) == 200
    assert post(stack.http, path, 99) == 500
    text = stack.metrics().text
    checked = subprocess.run(
        [tools.program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    # It reads all of it (1 would say that it cannot), and dislikes only what Triton called its metrics.
    said = (checked.stdout + checked.stderr).splitlines()
    assert checked.returncode == 3
    assert [line for line in said if not line.startswith("nv_")] == []
    reply = stack.http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert reply.text.endswith("# EOF\n")
    known = {metric.name.removesuffix("_total") for metric in CATALOGUE}
    named = {line.split()[2].removesuffix("_total") for line in text.splitlines() if line.startswith("# TYPE")}
    assert {name for name in named if not name.startswith("nv_")} <= known
