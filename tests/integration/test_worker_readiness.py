"""A worker started alone is ready when it has loaded what it should hold: rollouts end its predecessor then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx2

from millstream.services.environment import child_environment
from tests.kit import models
from tests.kit.ports import free_port
from tests.kit.stack import WAIT_S, Stack, running_stack
from tests.kit.wait import wait_until

NAMES = [f"m{i}" for i in range(6)]


def status(port: int, path: str) -> int:
    """Return the status of a path on a worker's port; 0: nobody listens yet."""
    try:
        return httpx2.get(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S, trust_env=False).status_code
    except httpx2.TransportError:
        return 0


def loaded(stack: Stack, pid: int) -> int:
    """Return how many instances a worker has published as ready."""
    workers = stack.http.get("/admin/v1/workers").json()["workers"]
    return sum(len(one["instances"]) for one in workers if one["pid"] == pid)


def test_a_worker_is_ready_when_it_has_loaded_its_versions(tmp_path: Path) -> None:
    files = {name: models.scale(tmp_path / f"{name}.onnx") for name in NAMES}
    with running_stack(tmp_path, models=files) as stack:
        port = free_port()
        environment = {
            "MILLSTREAM_HOME": str(stack.home),
            "MILLSTREAM_REDIS_URL": f"unix://{stack.socket}",
            "MILLSTREAM_METRICS_PORT": str(port),
        }
        command = [sys.executable, "-P", "-m", "millstream.workers", "--pool", "cpu", "--index", "alone"]
        worker = subprocess.Popen(command, env=child_environment(environment), stderr=subprocess.DEVNULL)
        try:
            seen: list[tuple[int, int]] = []

            def ready() -> bool:
                seen.append((status(port, "/ready"), status(port, "/live")))
                return seen[-1][0] == 200

            wait_until(ready)
            assert {one[0] for one in seen} <= {0, 503, 200}
            assert (503, 200) in seen, "it lives before it is ready"
            wait_until(lambda: loaded(stack, worker.pid) == len(NAMES))
            assert status(port, "/metrics") == 200
        finally:
            worker.terminate()
            assert worker.wait(WAIT_S) == 0
        wait_until(lambda: loaded(stack, worker.pid) == 0)
