"""A running server with a GPU and a CPU: who answers, what is measured and published, a race on the GPU."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.kit import models, v2
from tests.kit.command_line import Millstream
from tests.kit.load import constant_load
from tests.kit.races import raise_priorities
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TOLERANCE = 1e-3
WEIGHT_BYTES = 256 << 20
RACE = "/admin/v1/models/squeezenet/versions/1/race"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("gpu_pool")
    with running_stack(folder, pools="gpu=1,cpu=1") as stack:
        stack.push("squeezenet", models.squeezenet(folder / "squeezenet.onnx"))
        yield stack


def images(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {"data_0": np.random.default_rng(seed).standard_normal((rows, 3, 224, 224)).astype(np.float32)}


def answered_by(stack: Stack, pool: str, model: str = "squeezenet") -> float:
    return stack.metrics().value("millstream_request_duration_seconds_count", model=model, pool=pool)


def worker(stack: Stack, pool: str = "gpu") -> dict[str, Any]:
    [found] = [one for one in stack.http.get("/admin/v1/placement").json()["workers"] if one["pool"] == pool]
    return dict(found)


def test_the_gpu_answers_first_with_the_numbers_of_the_cpu(stack: Stack, tmp_path: Path) -> None:
    alone = onnxruntime.InferenceSession(
        models.squeezenet(tmp_path / "squeezenet.onnx"), providers=["CPUExecutionProvider"]
    )
    given = [images(rows, seed) for seed, rows in enumerate((1, 3, 8, 1))]
    bodies = [v2.request(one) for one in given]
    expected = [alone.run(None, one)[0] for one in given]
    before = answered_by(stack, "cpu")
    with constant_load(stack.port, "/v2/models/squeezenet/infer", bodies, callers=8) as load:
        load.more(100)
    for answer in load.answers:
        assert answer.status == 200, answer.body
        found = v2.outputs(answer.body, answer.headers)["scores"]
        np.testing.assert_allclose(found, expected[answer.sent], atol=TOLERANCE)
    assert answered_by(stack, "gpu") >= len(load.answers)
    assert answered_by(stack, "cpu") == before


def test_the_worker_publishes_its_gpu(stack: Stack) -> None:
    workers = stack.http.get("/admin/v1/workers").json()["workers"]
    [hardware] = [one["hardware"] for one in workers if one["pool"] == "gpu"]
    assert hardware["kind"] == "gpu"
    assert hardware["name"]
    assert hardware["memory_bytes"] > 1 << 30
    assert hardware["compute_capability"]
    page = stack.http.get("/metrics").text
    for name in ("nv_gpu_utilization", "nv_gpu_memory_total_bytes", "nv_gpu_memory_used_bytes"):
        assert f"{name}{{" in page


def test_bytes_on_the_device_are_measured_by_instance_and_given_back(stack: Stack, tmp_path: Path) -> None:
    before = worker(stack)["device_used_bytes"]
    stack.push("heavy", models.heavy(tmp_path / "heavy.onnx", WEIGHT_BYTES))
    body = v2.request({"x": np.ones((1, 1024), np.float32)})
    assert stack.http.post("/v2/models/heavy/infer", content=body[0], headers=body[1]).status_code == 200

    def measured() -> int:
        instances = worker(stack)["instances"]
        return next((one["device_size_bytes"] for one in instances if one["model"] == "heavy"), 0)

    size_bytes = wait_until(measured, what="its bytes are measured")
    assert WEIGHT_BYTES <= size_bytes <= 2 * WEIGHT_BYTES
    assert worker(stack)["device_used_bytes"] >= before + WEIGHT_BYTES
    assert "device" in Millstream(stack.home).ok("placement")
    assert stack.http.delete("/admin/v1/models/heavy").status_code in {200, 204}
    wait_until(lambda: worker(stack)["device_used_bytes"] <= before + WEIGHT_BYTES // 10, what="the device has it back")


def test_the_cpu_answers_while_the_gpu_is_away_and_no_request_is_lost(stack: Stack) -> None:
    body = v2.request(images(1))
    with constant_load(stack.port, "/v2/models/squeezenet/infer", [body], callers=4) as load:
        load.more(20)
        cpu, pid = answered_by(stack, "cpu"), stack.pids()["gpu-0"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: answered_by(stack, "cpu") > cpu, what="the CPU answers")
        wait_until(lambda: stack.pids().get("gpu-0", pid) != pid, what="another worker is started")
        gpu = answered_by(stack, "gpu")
        wait_until(lambda: answered_by(stack, "gpu") > gpu + 50, what="the GPU answers again")
    assert {answer.status for answer in load.answers} == {200}
    wanted = v2.outputs(load.answers[0].body, load.answers[0].headers)["scores"]
    for answer in load.answers:
        np.testing.assert_allclose(v2.outputs(answer.body, answer.headers)["scores"], wanted, atol=TOLERANCE)


def test_an_endless_run_on_the_gpu_is_ended_and_its_neighbours_go_on(stack: Stack, tmp_path: Path) -> None:
    stack.push("endless", models.endless(tmp_path / "endless.onnx", 5))
    bad = v2.request({"x": np.array([[5]])}, parameters={"timeout": 2_000_000})
    body = v2.request(images(1))
    with constant_load(stack.port, "/v2/models/squeezenet/infer", [body], callers=2) as load:
        load.more(10)
        reply = stack.http.post("/v2/models/endless/infer", content=bad[0], headers=bad[1])
        assert reply.status_code == 504, reply.text
        load.more(10)
    assert {answer.status for answer in load.answers} == {200}
    good = v2.request({"x": np.array([[1]])})
    assert stack.http.post("/v2/models/endless/infer", content=good[0], headers=good[1]).status_code == 200


def test_a_race_on_the_gpu_reaches_a_verdict(stack: Stack, tmp_path: Path) -> None:
    command = Millstream(stack.home)
    np.savez(tmp_path / "samples.npz", data_0=images(16)["data_0"])
    arguments = ["race", "squeezenet", "--pool", "gpu", "--race-seconds", "60", "--json"]
    command.ok(*arguments, "--no-wait", "--samples", str(tmp_path / "samples.npz"))

    def over() -> bool:
        raise_priorities(stack)
        return stack.http.get(RACE).json()["state"] in {"decided", "failed", "cancelled"}

    wait_until(over, 300)
    found = json.loads(command.ok("race", "squeezenet", "--pool", "gpu", "--show", "--json"))
    print(command.ok("race", "squeezenet", "--pool", "gpu", "--show"))
    assert found["state"] == "decided", found
    rows = {row["target"]: row for row in found["rows"]}
    assert "cuda-fp16" in rows
    assert rows["cuda-fp16"]["verdict"] in {"won", "lost"}, rows["cuda-fp16"]
    body = v2.request(images(2))
    assert stack.http.post("/v2/models/squeezenet/infer", content=body[0], headers=body[1]).status_code == 200
