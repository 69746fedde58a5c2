"""Races whose worker or process is killed, or whose version is deleted, go on or are gone; the version serves."""

from __future__ import annotations

import os
import re
import signal
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit import models, v2
from tests.kit.load import constant_load
from tests.kit.races import kill, processes, raise_priorities
from tests.kit.stack import Stack, assert_quiet, descendants, running_stack
from tests.kit.wait import wait_until

RACE = "/admin/v1/models/m/versions/1/race"
OPTIONS = {"accept_random_samples": True}  # with all targets: each test ends its race
BODY = v2.request({"data_0": np.ones((1, 3, 224, 224), np.float32)}, parameters=v2.PATIENT)
STAGE_S_MAX = 240.0
ATTEMPTS_MAX = 20  # to catch a race at a stage that it soon leaves


ANY = {"starting", "compiling", "judging", "measuring"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("races")) as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The shared stack with a version `m` of the test's own: deaths are counted for the content of a version."""
    shared.push("m", models.squeezenet(tmp_path / "m.onnx", seed=zlib.crc32(request.node.name.encode())))
    yield shared
    shared.http.delete("/admin/v1/models/m")  # 404 if the test deleted it
    wait_until(lambda: not processes(shared), what="no race runs")
    assert_quiet(shared)


def race(stack: Stack) -> dict[str, Any]:
    raise_priorities(stack)
    document: dict[str, Any] = stack.http.get(RACE).json()
    return document


def begin(stack: Stack) -> None:
    reply = stack.http.post(RACE, json=OPTIONS)
    assert reply.status_code == 202, reply.text


def goes_on(stack: Stack, tries: int) -> None:
    """Wait until the race measures again, which `tries` workers began; then cancel it."""
    wait_until(lambda: race(stack)["tries"] == tries, STAGE_S_MAX, what=f"try {tries}")
    until(stack, ANY)
    assert race(stack)["tries"] == tries
    answers(stack)
    assert stack.http.delete(RACE).json()["state"] == "cancelled"
    wait_until(lambda: not processes(stack))


def until(stack: Stack, stages: set[str]) -> str:
    """Wait until the race reported one of some stages; return it."""

    def reached() -> str | None:
        found = race(stack)
        assert found["state"] in {"queued", "running"}, found
        stage: str | None = found["progress"].get("stage")
        return stage if found["state"] == "running" and stage in stages else None

    return wait_until(reached, STAGE_S_MAX, what=f"the race is at {stages}")


def begun_at(stack: Stack, stages: set[str]) -> None:
    """Begin a race and wait until it is at one of some stages; begin it anew if it was seen too late."""
    for _ in range(ATTEMPTS_MAX):
        begin(stack)
        if until(stack, ANY if "starting" in stages else stages) in stages:
            return
        assert stack.http.delete(RACE).json()["state"] == "cancelled"
        wait_until(lambda: not processes(stack), what="it ended")
    raise AssertionError(f"no race was seen at {stages}")


def answers(stack: Stack) -> None:
    """Wait for an answer: while memory is short, a version that must be loaded may be refused for a moment."""

    def answered() -> bool:
        reply = stack.http.post("/v2/models/m/infer", content=BODY[0], headers=BODY[1])
        assert reply.status_code == 200 or "retry-after" in reply.headers, reply.text
        return reply.status_code == 200

    wait_until(answered, what="the version answers")


@pytest.mark.parametrize("stages", [{"starting"}, {"compiling", "judging", "measuring"}])
def test_a_race_whose_worker_is_killed_goes_on(stack: Stack, stages: set[str]) -> None:
    begun_at(stack, stages)
    worker = stack.pids()["cpu-0"]
    with constant_load(stack.port, "/v2/models/m/infer", [BODY], callers=2) as load:
        load.more(5)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: stack.pids().get("cpu-0", worker) != worker)
        load.more(20)
    assert all(answer.status == 200 for answer in load.answers)
    goes_on(stack, 2)


def test_a_race_whose_process_is_killed_goes_on(stack: Stack) -> None:
    begin(stack)
    until(stack, ANY)
    kill(processes(stack))
    wait_until(lambda: re.search(r"the race of m version 1 is interrupted: .*SIGKILL", stack.logs()), what="its death")
    goes_on(stack, 2)


def test_a_race_whose_compilation_is_killed_loses_that_candidate_alone(stack: Stack, tmp_path: Path) -> None:
    options = {"accept_random_samples": True, "targets": ["onnxruntime-int8-dynamic"]}
    for _ in range(ATTEMPTS_MAX):  # a compilation may be over before it is seen, or killed
        assert stack.http.delete("/admin/v1/models/m").status_code == 204
        stack.push("m", models.mlp(tmp_path / "mlp.onnx"))
        assert stack.http.post(RACE, json=options).status_code == 202
        wait_until(lambda: compilation_killed(stack) or is_decided(stack), STAGE_S_MAX, what="it compiles")
        wait_until(lambda: is_decided(stack), STAGE_S_MAX, what="it is decided")
        [row] = race(stack)["rows"]
        if row["verdict"] == "failed":
            break
    assert (row["verdict"], row["why"]) == ("failed", "its process was ended by SIGKILL")
    assert race(stack)["tries"] == 1
    assert not list(stack.home.glob("repository/models/m/1/compiled/race-*/*"))


def is_decided(stack: Stack) -> bool:
    return bool(race(stack)["state"] == "decided")


def compiles(pid: int) -> bool:
    """Return whether a process compiles, and measures no form."""
    with suppress(OSError):
        return b"TORCHINDUCTOR_COMPILE_THREADS=" in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def compilation_killed(stack: Stack) -> bool:
    """Kill the compilation in progress; return whether there is one."""
    compiling = [pid for pid in processes(stack, b"worker.form_process") if compiles(pid)]
    kill(compiling)
    return bool(compiling)


def test_a_race_goes_on_when_the_gateway_is_killed(stack: Stack) -> None:
    begin(stack)
    until(stack, ANY)
    gateway = stack.pids()["gateway-0"]
    os.kill(gateway, signal.SIGKILL)
    wait_until(lambda: stack.pids().get("gateway-0", gateway) != gateway)
    stack.reconnect()
    wait_until(lambda: stack.http.get("/v2/health/ready").status_code == 200)
    goes_on(stack, 1)


def test_a_version_that_is_replaced_during_its_race_is_raced_anew(stack: Stack, tmp_path: Path) -> None:
    begin(stack)
    until(stack, ANY)
    before = race(stack)
    assert stack.http.delete("/admin/v1/models/m").status_code == 204
    stack.push("m", models.mlp(tmp_path / "other.onnx"))
    assert stack.http.get(RACE).status_code == 404, "that race was of another model"
    begin(stack)
    until(stack, ANY)
    found = race(stack)
    assert (found["tries"], found["version"]) == (1, 1)
    assert found["requested_at"] > before["requested_at"]
    drivers = b"millstream.plugins.compile.worker\0"
    wait_until(lambda: len(processes(stack, drivers)) == 1, what="the one before has ended")
    assert stack.http.delete(RACE).json()["state"] == "cancelled"
    wait_until(lambda: not processes(stack))


def test_a_race_gives_its_memory_to_a_load(tmp_path: Path) -> None:
    """It reserves what is free; the load takes its part, and the race begins again with less, or waits."""
    path = models.squeezenet(tmp_path / "m.onnx")
    with running_stack(tmp_path, models={"m": path}, settings={"worker_memory": "1536MiB"}) as stack:
        begin(stack)
        until(stack, ANY)
        with constant_load(stack.port, "/v2/models/m/infer", [BODY], callers=2) as load:
            load.more(5)
            content = models.wide(tmp_path / "n.onnx", 10 << 20).read_bytes()
            assert stack.http.post("/admin/v1/models/n/versions", content=content).status_code == 201
            # It may be on standby: the record that its gateway has read says that no memory is free.
            row = v2.request({"x": np.ones((1, 1), np.float32)})
            wait_until(lambda: stack.http.post("/v2/models/n/infer", content=row[0], headers=row[1]).status_code == 200)
            load.more(5)
        assert all(answer.status == 200 for answer in load.answers)
        wait_until(lambda: "is interrupted: a load needs the memory" in stack.logs(), what="the race gave way")
        found = race(stack)
        assert found["state"] in {"queued", "running"}
        assert found["tries"] <= 1, "only a death costs a try"
        assert stack.http.delete(RACE).json()["state"] == "cancelled"
        wait_until(lambda: not processes(stack))


def test_a_race_that_is_cancelled_ends_at_once(stack: Stack) -> None:
    begin(stack)
    until(stack, ANY)
    assert stack.http.delete(RACE).status_code == 200
    wait_until(lambda: not processes(stack))
    assert race(stack)["state"] == "cancelled"
    answers(stack)


def test_a_version_that_is_deleted_ends_its_race(stack: Stack) -> None:
    begin(stack)
    until(stack, ANY)
    assert stack.http.delete("/admin/v1/models/m").status_code == 204
    wait_until(lambda: not processes(stack))
    wait_until(lambda: not list((stack.home / "repository" / "races").glob("m@*.json")), what="its race is gone")
    wait_until(lambda: not (stack.home / "repository" / "models" / "m").exists(), what="its files are gone")


def test_a_race_goes_on_when_everything_was_stopped_and_started_again(tmp_path: Path) -> None:
    with running_stack(tmp_path, models={"m": models.squeezenet(tmp_path / "m.onnx")}) as stack:
        begin(stack)
        until(stack, ANY)
    with running_stack(tmp_path) as stack:
        answers(stack)  # it was on standby: the call loads it
        until(stack, ANY)
        assert stack.http.delete(RACE).json()["state"] == "cancelled"
        wait_until(lambda: not processes(stack))


def test_two_workers_run_one_race(tmp_path: Path) -> None:
    with running_stack(tmp_path, pools="cpu=2", models={"m": models.squeezenet(tmp_path / "m.onnx")}) as stack:
        begin(stack)
        until(stack, ANY)
        workers = {stack.pids()["cpu-0"], stack.pids()["cpu-1"]}
        racing = [pid for pid in workers if set(descendants(pid)) & set(processes(stack))]
        assert len(racing) <= 1  # 0: another worker begins it just now
        goes_on(stack, 1)


def test_a_race_without_memory_waits_and_says_so(tmp_path: Path) -> None:
    path = models.squeezenet(tmp_path / "m.onnx")
    with running_stack(tmp_path, models={"m": path}, settings={"worker_memory": "600MiB"}) as stack:
        begin(stack)
        wait_until(lambda: "it waits for memory" in race(stack)["why"])
        assert race(stack)["state"] == "queued"
        assert "--memory" in race(stack)["why"]
        assert not processes(stack)
        answers(stack)


def test_a_race_waits_for_a_version_that_is_being_loaded(tmp_path: Path) -> None:
    path = models.squeezenet(tmp_path / "m.onnx")
    with running_stack(tmp_path, settings={"queue_lease_s": 120}) as stack:
        worker = stack.pids()["cpu-0"]
        os.kill(worker, signal.SIGSTOP)
        try:
            assert stack.http.post("/admin/v1/models/m/versions", content=path.read_bytes()).status_code in {201, 202}
            wait_until(lambda: stack.http.get("/admin/v1/models/m/versions/1").status_code == 200)
            wait_until(lambda: stack.http.post(RACE, json=OPTIONS).status_code != 404)
            found = race(stack)
            assert (found["state"], found["why"]) == ("queued", "the version is being loaded")
            assert stack.http.delete(RACE).json()["state"] == "cancelled"
            assert stack.http.post(RACE, json=OPTIONS).json()["why"] == "the version is being loaded"
        finally:
            os.kill(worker, signal.SIGCONT)
        goes_on(stack, 1)
