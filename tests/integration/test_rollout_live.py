"""New versions, failures of versions, deletion, the end: all under load that never stops and must not notice."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from millstream.services.model.manifest import Manifest
from tests.kit import models, v2
from tests.kit.load import Answer, Load, constant_load
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.wait import wait_until

X = np.array([[1, 2], [3, 4]], np.float32)
#: no request expires while workers are frozen
PATIENT = {"timeout": 600_000_000}
BODIES = [
    v2.request({"x": X * i}, binary=bool(i % 2), binary_outputs=bool(i % 2), parameters=PATIENT) for i in range(1, 9)
]


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


def at_every_gateway(stack: Stack, true: Callable[[httpx2.Client], Any]) -> None:
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
        # one gateway, one switch at a time: never back and forth; a caller that was held up may have missed a version
        seen_by_caller = [version for version, _ in groupby(versions)]
        order = iter(["1", "2", "3", "1"])
        assert all(version in order for version in seen_by_caller), seen_by_caller


def _model(http: httpx2.Client, name: str) -> dict[str, Any]:
    document: dict[str, Any] = http.get(f"/admin/v1/models/{name}").json()
    return document


def test_a_version_that_cannot_be_loaded_leaves_the_old_one_serving(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    stack.push("damaged", models.scale(path, factor=2.0))
    with constant_load(stack.port, "/v2/models/damaged/infer", BODIES, callers=2) as load:
        load.more(10)
        with sigstopped(*(pid for name, pid in stack.pids().items() if name.startswith("cpu-"))):
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
    assert {answer.status for answer in load.answers} == {200, 404}
    for answer in load.answers:
        assert answer.status == 200 or b"Request for unknown model: 'deleted' is not found" in answer.body
    assert stack.redis.keys("ms:*deleted*") == [] or wait_until(lambda: not stack.redis.keys("ms:*deleted*"))


def test_stopping_answers_what_was_accepted(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    settings = {"drain_s": 100, "queue_lease_s": 60}  # of a busy machine
    with running_stack(tmp_path, gateways=2, models={"last": path}, settings=settings) as stack:
        body, headers = BODIES[1]
        with sigstopped(stack.pids()["cpu-0"]):
            sent = [stack.send("/v2/models/last/infer", body, headers) for _ in range(20)]
            wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= 20)
            stack.process.send_signal(signal.SIGTERM)
            stack.wait_for_line("SIGTERM: answering requests in flight, then stopping")
        for connection in sent:
            reply = connection.getresponse()
            got = v2.outputs(reply.read(), dict(reply.getheaders()))
            assert reply.status == 200
            np.testing.assert_array_equal(got["y"], X * 2 * np.float32(2.0))
            connection.close()
        assert stack.end() == 0
        assert "stopped" in stack.lines
