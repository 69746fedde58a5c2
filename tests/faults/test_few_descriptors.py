"""Where there are fewer file descriptors than connections, idle connections take none that keys and models need."""

from __future__ import annotations

import os
import resource
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import httpx2

from tests.kit import models
from tests.kit.scale_model import BODIES
from tests.kit.stack import running_stack
from tests.kit.wait import wait_until

FILES = 600
IDLE = 1500


def is_accepted(url: str) -> bool:
    """Whether a new connection is accepted, and not refused as one too many."""
    try:
        return httpx2.get(f"{url}/v2/health/live", trust_env=False).status_code == 200
    except httpx2.TransportError:
        return False


def test_idle_connections_leave_descriptors_for_keys_and_models(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with (
        running_stack(tmp_path, models={"m": path}, settings={"admin_key": "k" * 32}) as stack,
        ExitStack() as until_end,
    ):
        # A process that starts now has the limit of its parent.
        resource.prlimit(stack.process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        first = stack.pids()["gateway-0"]
        os.kill(first, signal.SIGKILL)
        stack.wait_for_line("the rest of the files is kept for keys and models")
        stack.reconnect()
        gateway = wait_until(lambda: (pid := stack.pids().get("gateway-0")) != first and pid)
        wait_until(lambda: stack.http.get("/v2/models/m/ready").status_code == 200)
        bound = stack.metrics().value("millstream_gateway_connections_max")
        assert 50 < bound < FILES / 3
        idle = [until_end.enter_context(socket.socket()) for _ in range(IDLE)]
        for one in idle:
            one.settimeout(60)
            one.connect(("127.0.0.1", stack.port))
        wait_until(lambda: len(list(Path(f"/proc/{gateway}/fd").iterdir())) > bound)
        # This client's connection was accepted before.
        key = stack.http.post("/admin/v1/keys", json={"name": "a", "scopes": ["infer:*"]})
        assert key.status_code == 201, key.text
        pushed = stack.http.post("/admin/v1/models/n/versions", params={"wait": 240}, content=path.read_bytes())
        assert (pushed.status_code, pushed.json()["state"]) == (201, "ready"), pushed.text
        body, headers = BODIES[0]
        reply = stack.http.post("/v2/models/n/infer", content=body, headers=headers)
        assert reply.status_code == 200, reply.text
        for one in idle:
            one.close()
        wait_until(lambda: is_accepted(stack.url))
        assert stack.pids()["gateway-0"] == gateway
        assert "Too many open files" not in stack.logs()
