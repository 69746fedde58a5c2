"""New versions, failures of versions and of workers, deletion: all under load that never stops and must not notice."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from services.manifest import Manifest
from tests.kit import models, v2
from tests.kit.load import Answer, Load, constant_load
from tests.kit.stack import Stack, asleep, running_stack
from tests.kit.wait import wait_until

X = np.array([[1, 2], [3, 4]], np.float32)
BODIES = [v2.request({"x": X * i}, binary=bool(i % 2), binary_outputs=bool(i % 2)) for i in range(1, 9)]


def check_answers(load: Load, factors: dict[str, float]) -> None:
    """Every answer is a 200, the caller's own rows, by the version that it names."""
    for answer in load.answers:
        assert answer.status == 200, answer.body
        factor = factors[version_of(answer)]
        got = v2.outputs(answer.body, answer.headers)["y"].astype(np.float32)
        np.testing.assert_array_equal(got, X * (answer.sent + 1) * np.float32(factor))


def version_of(answer: Answer) -> str:
    length = answer.headers.get("inference-header-content-length")
    version = json.loads(answer.body[: int(length)] if length else answer.body)["model_version"]
    assert isinstance(version, str)
    return version


def each_caller(load: Load) -> Iterator[list[Answer]]:
    for caller in {answer.caller for answer in load.answers}:
        yield [answer for answer in load.answers if answer.caller == caller]


def at_every_gateway(stack: Stack, true: Callable[[httpx.Client], Any]) -> None:
    """Wait until `true` of every gateway."""
    for number in range(stack.gateways):
        with stack.gateway(number) as gateway:
            wait_until(partial(true, gateway))


def test_activating_a_version_under_load_fails_no_request(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    stack.push("rolling", models.scale(path, factor=2.0))
    with constant_load(stack.port, "/v2/models/rolling/infer", BODIES) as load:
        load.more(50)
        for version, factor in ((2, 3.0), (3, 4.0)):
            stack.push("rolling", models.scale(path, factor=factor))
            at_every_gateway(stack, lambda http: _model(http, "rolling")["serving"] == version)  # noqa: B023
            seen = len(load.answers) + 8  # each caller may have one on its way
            load.more(50)
            assert {version_of(answer) for answer in load.answers[seen:]} == {str(version)}
        reply = stack.http.post("/admin/v1/models/rolling/versions/1/activate")
        assert (reply.status_code, reply.json()["active"]) == (200, 1)
        at_every_gateway(stack, lambda http: _model(http, "rolling")["serving"] == 1)
        load.more(50)
    check_answers(load, {"1": 2.0, "2": 3.0, "3": 4.0})
    for answers in each_caller(load):
        versions = [version_of(answer) for answer in answers]
        # one gateway, one switch at a time: never back and forth
        changes = [(one, other) for one, other in pairwise(versions) if one != other]
        assert changes == [("1", "2"), ("2", "3"), ("3", "1")]


def _model(http: httpx.Client, name: str) -> dict[str, Any]:
    document: dict[str, Any] = http.get(f"/admin/v1/models/{name}").json()
    return document


def test_a_version_that_cannot_be_loaded_leaves_the_old_one_serving(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    stack.push("damaged", models.scale(path, factor=2.0))
    with constant_load(stack.port, "/v2/models/damaged/infer", BODIES, callers=2) as load:
        load.more(10)
        with asleep(*(pid for name, pid in stack.pids().items() if name.startswith("cpu-"))):
            # published and asked for; on its way to the workers the disk loses a bit
            reply = stack.http.put(
                "/admin/v1/models/damaged/versions/2", content=models.scale(path, factor=3.0).read_bytes()
            )
            assert reply.status_code == 201
            folder = stack.home / "repository" / "models" / "damaged" / "2"
            served = folder / Manifest.model_validate_json((folder / "manifest.json").read_bytes()).served
            content = bytearray(served.read_bytes())
            content[-1] ^= 1
            served.chmod(0o600)
            served.write_bytes(content)
        version = "/admin/v1/models/damaged/versions/2"
        at_every_gateway(stack, lambda http: http.get(version).json()["state"] == "failed")
        document = stack.http.get(version).json()
        assert "sha256 differs" in document["reason"]
        assert _model(stack.http, "damaged")["serving"] == 1
        refused = stack.http.post(f"{version}/activate")
        assert refused.status_code == 409
        assert "sha256 differs" in refused.json()["error"]
        load.more(10)
    check_answers(load, {"1": 2.0})
    body, headers = BODIES[0]
    reply = stack.http.post("/v2/models/damaged/versions/2/infer", content=body, headers=headers)
    assert reply.status_code == 503
    assert "sha256 differs" in reply.json()["error"]
    stack.http.delete(version).raise_for_status()


def test_deleting_a_model_under_load_gives_404_only_afterwards(stack: Stack, tmp_path: Path) -> None:
    stack.push("deleted", models.scale(tmp_path / "m.onnx"))
    with constant_load(stack.port, "/v2/models/deleted/infer", BODIES) as load:
        load.more(50)
        assert stack.http.delete("/admin/v1/models/deleted").status_code == 204
        at_every_gateway(stack, lambda http: http.get("/v2/models/deleted").status_code == 404)
        load.more(50)
    for answers in each_caller(load):
        statuses = [answer.status for answer in answers]
        kept = statuses.count(200)
        assert statuses == [200] * kept + [404] * (len(statuses) - kept)
        assert 0 < kept < len(statuses)
        assert b"Request for unknown model: 'deleted' is not found" in answers[-1].body
    assert stack.redis.keys("mr:*deleted*") == [] or wait_until(lambda: not stack.redis.keys("mr:*deleted*"))


def test_a_worker_that_is_killed_under_load_costs_no_request(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, gateways=2, pools="cpu=2", models={"steady": path}) as stack:
        before = stack.pids()
        with constant_load(stack.port, "/v2/models/steady/infer", BODIES, callers=16) as load:
            for name in ("cpu-0", "cpu-1"):
                load.more(200)
                os.kill(before[name], signal.SIGKILL)
                stack.heard(f"{name} was ended by SIGKILL: starting it again")
                wait_until(lambda: stack.pids().get(name, before[name]) != before[name])  # noqa: B023
                stack.settled("steady", 1)
            load.more(200)
        check_answers(load, {"1": 2.0})
        workers = stack.http.get("/admin/v1/workers").json()["workers"]
        assert {worker["pid"] for worker in workers} == {stack.pids()["cpu-0"], stack.pids()["cpu-1"]}


def test_the_only_worker_is_killed_with_requests_in_hand(tmp_path: Path) -> None:
    path = models.slow(tmp_path / "m.onnx", rounds=2000)
    with running_stack(tmp_path, models={"slow": path}) as stack:
        x = np.random.default_rng(1).standard_normal((1, 128), np.float32)
        body, headers = v2.request({"x": x})
        first = stack.http.post("/v2/models/slow/infer", content=body, headers=headers)
        expected = v2.outputs(first.content, first.headers)["y"]
        worker = stack.pids()["cpu-0"]
        with asleep(worker):
            sent = [stack.send("/v2/models/slow/infer", body, headers) for _ in range(20)]
            wait_until(lambda: stack.metrics().value("millrace_requests_in_flight") >= 20)
            os.kill(worker, signal.SIGKILL)
        stack.heard("cpu-0 was ended by SIGKILL: starting it again")
        for connection in sent:
            reply = connection.getresponse()
            got = v2.outputs(reply.read(), dict(reply.getheaders()))
            assert reply.status == 200
            np.testing.assert_allclose(got["y"], expected, rtol=1e-3, atol=1e-4)
            connection.close()
        assert stack.metrics().value("millrace_reclaimed_total") >= 1


def test_a_gateway_that_is_killed_comes_back_and_the_other_serves_on(tmp_path: Path) -> None:
    path = models.identity(tmp_path / "m.onnx", shape=("N", 16384))
    with running_stack(tmp_path, gateways=2, models={"large": path}) as stack:
        body, headers = v2.request({"x": np.ones((1, 16384), np.float32)})
        with stack.gateway(0) as dying, stack.gateway(1) as other:
            assert dying.post("/v2/models/large/infer", content=body, headers=headers).status_code == 200
            pid = stack.pids()["gateway-0"]
            assert list(stack.segments_dir.glob(f"{stack.instance}-0-{pid}-*")) != []
            os.kill(pid, signal.SIGKILL)
            stack.heard("gateway-0 was ended by SIGKILL: starting it again")
            # its connection is gone; the next one finds the other
            assert dying.post("/v2/models/large/infer", content=body, headers=headers).status_code == 200
            assert other.post("/v2/models/large/infer", content=body, headers=headers).status_code == 200
        wait_until(lambda: stack.pids().get("gateway-0", pid) != pid)
        with stack.gateway(0) as back:
            wait_until(lambda: back.get("/v2/health/ready").status_code == 200)
            assert back.post("/v2/models/large/infer", content=body, headers=headers).status_code == 200
        # the memory of the one that died is nobody's: it is given back while the others run
        wait_until(lambda: not list(stack.segments_dir.glob(f"{stack.instance}-0-{pid}-*")))


@pytest.mark.parametrize("how", ["killed", "flushed"])
def test_redis_forgets_everything_under_load(tmp_path: Path, how: str) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, gateways=2, pools="cpu=2", models={"steady": path}) as stack:
        pid = stack.pids()["redis"]
        with constant_load(stack.port, "/v2/models/steady/infer", BODIES) as load:
            load.more(100)
            if how == "killed":
                os.kill(pid, signal.SIGKILL)
                stack.heard("redis was ended by SIGKILL: starting it again")
                wait_until(lambda: stack.pids().get("redis", pid) != pid)
            else:
                stack.redis.flushall()
            load.more(100)
            stack.settled("steady", 1)
            load.more(100)
        check_answers(load, {"1": 2.0})


def test_stopping_answers_what_was_accepted(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, gateways=2, models={"last": path}) as stack:
        body, headers = BODIES[1]
        with asleep(stack.pids()["cpu-0"]):
            sent = [stack.send("/v2/models/last/infer", body, headers) for _ in range(20)]
            wait_until(lambda: stack.metrics().value("millrace_requests_in_flight") >= 20)
            stack.process.send_signal(signal.SIGTERM)
            stack.heard("SIGTERM: answering what is on its way, then stopping")
        for connection in sent:
            reply = connection.getresponse()
            got = v2.outputs(reply.read(), dict(reply.getheaders()))
            assert reply.status == 200
            np.testing.assert_array_equal(got["y"], X * 2 * np.float32(2.0))
            connection.close()
        assert stack.end() == 0
        assert "stopped" in stack.lines
