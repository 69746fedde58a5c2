"""A worker's memory has a limit: what asks for more is one request or one load that fails, and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx2
import numpy as np
import pytest

from tests.kit import models, v2
from tests.kit.command_line import Millstream
from tests.kit.stack import Stack, running_stack

MIB = 1 << 20
LIMIT_BYTES = 768 * MIB
BOTH_NUMBERS = r"it takes \d+ MiB of memory, and this worker has \d+ MiB for models: raise --memory"
ALONE = json.dumps({"batching": False})


def peak_bytes(pid: int) -> int:
    """The most memory of a process since its last load was measured."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10


def ask(stack: Stack, model: str, **inputs: v2.Array) -> httpx2.Response:
    body, headers = v2.request(inputs, parameters=v2.PATIENT)
    return stack.http.post(f"/v2/models/{model}/infer", content=body, headers=headers)


def test_a_request_or_a_load_that_asks_for_more_fails_alone(tmp_path: Path) -> None:
    blank, steady = models.blank(tmp_path / "blank.onnx"), models.scale(tmp_path / "steady.onnx")
    heavy = models.weighty(tmp_path / "heavy.onnx", 400 * MIB)
    settings = {"worker_memory": f"{LIMIT_BYTES}"}
    row = np.ones((1, 2), np.float32)
    with running_stack(tmp_path, settings=settings, models={"steady": steady}) as stack:
        stack.push("blank", blank, config=ALONE)
        worker = stack.pids()["cpu-0"]
        page = stack.metrics()
        assert page.value("millstream_worker_memory_budget_bytes") == LIMIT_BYTES
        for count in (LIMIT_BYTES // 4, 100 * LIMIT_BYTES, 1 << 61):
            reply = ask(stack, "blank", count=np.array([count], np.int64))
            assert reply.status_code == 500, reply.text
            assert ask(stack, "steady", x=row).status_code == 200
        reply = ask(stack, "blank", count=np.array([LIMIT_BYTES // 4], np.int64))
        assert "out of memory" in reply.json()["error"]
        assert ask(stack, "blank", count=np.array([MIB], np.int64)).status_code == 200
        assert stack.metrics().value("millstream_runs_out_of_memory_total", model="blank") >= 3

        assert peak_bytes(worker) <= LIMIT_BYTES + 8 * MIB  # the interpreter and the libraries included

        reply = stack.http.post("/admin/v1/models/heavy/versions", params={"wait": 110}, content=heavy.read_bytes())
        assert reply.json()["state"] == "failed", "no worker can hold it"
        assert re.match(BOTH_NUMBERS, reply.json()["reason"])
        refused = ask(stack, "heavy", x=row[:, :1])
        assert refused.status_code == 503, refused.text
        assert re.search(BOTH_NUMBERS, refused.json()["error"])
        assert re.search(BOTH_NUMBERS, Millstream(stack.home).fails("push", "heavy", heavy))
        assert ask(stack, "steady", x=row).status_code == 200
        assert stack.pids()["cpu-0"] == worker
        assert peak_bytes(worker) <= LIMIT_BYTES + 8 * MIB  # the interpreter and the libraries included


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ("8Gi", "--memory: write a size like 8GiB"),
        ("1MiB", "too small for one worker"),
        ("gpu=8GiB", "there is no pool gpu; the pools are cpu"),
    ],
)
def test_a_budget_that_is_none_is_wrong_usage(tmp_path: Path, memory: str, said: str) -> None:
    command = [sys.executable, "-m", "millstream.services.cli", "up", "--home", str(tmp_path), "--memory", memory]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_workers_go_before_the_others_when_the_machine_runs_out_of_memory(tmp_path: Path) -> None:
    with running_stack(tmp_path, pools="cpu=2") as stack:
        scores = {name: int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for name, pid in stack.pids().items()}
        own = int(Path(f"/proc/{stack.process.pid}/oom_score_adj").read_text())
        assert (scores["gateway-0"], scores["redis"]) == (own, own)
        assert min(scores["cpu-0"], scores["cpu-1"]) > own
        limits = [one for one in stack.metrics().samples if one.name == "millstream_worker_memory_budget_bytes"]
        assert len(limits) == 2
