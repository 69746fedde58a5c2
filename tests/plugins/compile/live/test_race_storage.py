"""Races in a repository that is full or cannot be written: the version serves, and the race goes on afterwards."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit import models, v2
from tests.kit.disk import plain_disk, small_disk
from tests.kit.load import constant_load
from tests.kit.races import RaceProcess, kill, processes, race_task, raise_priorities
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

RACE = "/admin/v1/models/m/versions/1/race"
OPTIONS = {"accept_random_samples": True}  # with all targets: each test ends its race
BODY = v2.request({"data_0": np.ones((1, 3, 224, 224), np.float32)}, parameters=v2.PATIENT)
STAGE_S_MAX = 240.0
DISK_BYTES = 96 << 20
FULL = "the disk is full; free space or delete versions"
REFUSED = "Permission denied; give this user the right to read and write it"


def race(stack: Stack) -> dict[str, Any]:
    raise_priorities(stack)
    document: dict[str, Any] = stack.http.get(RACE).json()
    return document


def measures(stack: Stack) -> bool:
    found = race(stack)
    assert found["state"] in {"queued", "running"}, found
    return found["state"] == "running" and found["progress"].get("stage") in {"compiling", "judging", "measuring"}


def begin(stack: Stack) -> None:
    reply = stack.http.post(RACE, json=OPTIONS)
    assert reply.status_code == 202, reply.text


def cancel(stack: Stack) -> None:
    assert stack.http.delete(RACE).json()["state"] == "cancelled"


@pytest.mark.needs("tmpfs")
def test_a_race_that_a_full_disk_ends_goes_on_when_there_is_space(tmp_path: Path) -> None:
    path = models.squeezenet(tmp_path / "m.onnx")
    with small_disk(DISK_BYTES) as disk, running_stack(tmp_path, disk=disk, models={"m": path}) as stack:
        few = io.BytesIO()  # random ones would take more than the disk has
        np.savez(few, data_0=np.random.default_rng(0).standard_normal((4, 3, 224, 224)).astype(np.float32))
        assert stack.http.put(f"{RACE}/samples", content=few.getvalue()).status_code == 200
        begin(stack)
        wait_until(lambda: measures(stack), STAGE_S_MAX, what="it measures")
        with constant_load(stack.port, "/v2/models/m/infer", [BODY], callers=2) as load:
            disk.fill()
            load.more(5)
            kill(processes(stack))
            stack.wait_for_line(FULL)
            assert race(stack)["state"] == "running", "that its process died cannot be written"
            load.more(5)
            disk.empty()
        assert all(answer.status == 200 for answer in load.answers)
        wait_until(lambda: race(stack)["tries"] == 2, what="it begins again")
        wait_until(lambda: measures(stack), STAGE_S_MAX, what="it measures")
        cancel(stack)


def test_a_race_that_cannot_be_written_is_said_once_and_goes_on(tmp_path: Path) -> None:
    path = models.squeezenet(tmp_path / "m.onnx")
    with running_stack(tmp_path, disk=plain_disk(tmp_path), models={"m": path}) as stack:
        folder = stack.home / "repository" / "races"
        begin(stack)
        wait_until(lambda: measures(stack), STAGE_S_MAX, what="it measures")
        folder.chmod(0o500)
        try:
            for file in folder.glob("*.lock"):
                file.chmod(0o400)
            kill(processes(stack))
            stack.wait_for_line(REFUSED)
            body, headers = BODY
            assert stack.http.post("/v2/models/m/infer", content=body, headers=headers).status_code == 200
            reply = stack.http.delete(RACE)
            assert reply.status_code == 500
            assert REFUSED in reply.json()["error"]
        finally:
            folder.chmod(0o700)
            for file in folder.glob("*.lock"):
                file.chmod(0o600)
        wait_until(lambda: race(stack)["tries"] == 2, what="it begins again")
        wait_until(lambda: measures(stack), STAGE_S_MAX, what="it measures")
        cancel(stack)


@pytest.mark.needs("tmpfs")
def test_a_race_without_space_for_its_files_says_what_to_do() -> None:
    with small_disk(32 << 20) as disk:
        task = race_task(disk.seen(disk.folder) / "race")
        disk.fill()
        assert RaceProcess(task).error() == f"cannot write to {task.cache}: {FULL}"
