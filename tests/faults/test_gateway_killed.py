"""A gateway is killed: it loses its own connections, the others serve on, and nothing of it stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np

from tests.kit import models, v2
from tests.kit.stack import running_stack
from tests.kit.wait import wait_until


def test_a_gateway_that_is_killed_comes_back_and_the_other_serves_on(tmp_path: Path) -> None:
    path = models.identity(tmp_path / "m.onnx", shape=("N", 16384))
    with running_stack(tmp_path, gateways=2, models={"large": path}) as stack:
        body, headers = v2.request({"x": np.ones((1, 16384), np.float32)})
        with stack.gateway(0) as dying, stack.gateway(1) as other:
            assert dying.post("/v2/models/large/infer", content=body, headers=headers).status_code == 200
            pid = stack.pids()["gateway-0"]
            assert list(stack.shm_dir.glob(f"{stack.shm_prefix}.0-{pid}-*")) != []
            os.kill(pid, signal.SIGKILL)
            stack.wait_for_line("gateway-0 was ended by SIGKILL: restarting it")
            # its connection is gone; the next one finds the other, or a new one
            assert dying.post("/v2/models/large/infer", content=body, headers=headers).status_code == 200
            assert other.post("/v2/models/large/infer", content=body, headers=headers).status_code == 200
        wait_until(lambda: stack.pids().get("gateway-0", pid) != pid)
        with stack.gateway(0) as back:
            wait_until(lambda: back.get("/v2/health/ready").status_code == 200)
            assert back.post("/v2/models/large/infer", content=body, headers=headers).status_code == 200
        # the memory of the gateway that died has no owner: it is removed while the others run
        wait_until(lambda: not list(stack.shm_dir.glob(f"{stack.shm_prefix}.0-{pid}-*")))


def test_a_version_that_nobody_activated_is_not_activated_by_a_new_gateway(tmp_path: Path) -> None:
    with running_stack(tmp_path) as stack:
        stack.push("active", models.scale(tmp_path / "m.onnx"))
        stack.push("passive", tmp_path / "m.onnx", activate=False)
        before = stack.pids()["gateway-0"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: stack.pids().get("gateway-0", before) != before)
        stack.settled("passive", 1)
        stack.settled("active", 1)
        assert stack.http.get("/v2/models/active").status_code == 200
        assert stack.http.get("/v2/models/passive/versions/1").status_code == 200
        assert stack.http.get("/v2/models/passive").status_code == 404
        assert stack.http.get("/admin/v1/models/passive").json()["serving"] is None
