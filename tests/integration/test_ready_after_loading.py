"""Readiness at the start: gateways are ready when the models that `millstream up` names are loaded, not earlier."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from millstream.gateway.scheduling.readiness import Preloads
from millstream.services.environment import child_environment
from millstream.services.supervisor.listener import PreloadPipe
from tests.kit.stack import children
from tests.kit.wait import wait_until

ROOT = Path(__file__).parents[2]
REQUEST = json.loads((ROOT / "examples" / "digits" / "request.json").read_text())
WAIT_S = 240.0


@dataclass(frozen=True)
class Held:
    """An installation whose models of the start are loaded, but for what `end_loading` waits for."""

    process: subprocess.Popen[str]
    http: httpx2.Client
    grpc: str

    def end_loading(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ready\n"

    def readiness(self) -> tuple[int, bool, int]:
        """Return what HTTP, gRPC's ServerReady and grpc.health.v1 say."""
        with grpc.insecure_channel(self.grpc) as channel:
            stub, health = service_pb2_grpc.GRPCInferenceServiceStub(channel), health_pb2_grpc.HealthStub(channel)
            ready = stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=WAIT_S, wait_for_ready=True).ready
            status = health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S, wait_for_ready=True).status
        return self.http.get("/v2/health/ready").status_code, ready, status

    def gateway(self) -> int | None:
        """Return the pid of the gateway; None while it is restarted."""
        for pid in children(self.process.pid):
            with suppress(OSError):  # it has just ended
                if b"millstream.gateway" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    def restart_gateway(self) -> None:
        """Kill the gateway, and wait until the one that the supervisor starts in its place answers."""
        before = self.gateway()
        assert before is not None
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: self.gateway() not in (None, before), WAIT_S, "the gateway is restarted")
        wait_until(self._answers, WAIT_S, "it answers")

    def _answers(self) -> bool:
        try:
            return self.http.get("/v2/health/live").is_success
        except httpx2.TransportError:
            return False


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    settings = {"HOME": tmp_path / "home", "HTTP_PORT": 0, "GRPC_PORT": 0}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.programs.hold_loading"],
        cwd=ROOT,
        env=child_environment({f"MILLSTREAM_{name}": str(value) for name, value in settings.items()}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            assert process.stdout is not None
            word, url, address = process.stdout.readline().split()
            assert word == "loaded"
            with httpx2.Client(base_url=url, timeout=WAIT_S, trust_env=False) as http:
                yield Held(process, http, address)
            process.terminate()
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


def test_gateways_are_ready_when_the_models_of_the_start_are_loaded(held: Held) -> None:
    not_ready = (503, False, health_pb2.HealthCheckResponse.NOT_SERVING)
    ready = (200, True, health_pb2.HealthCheckResponse.SERVING)
    assert held.readiness() == not_ready
    reason = held.http.get("/v2/health/ready").json()["error"]
    assert reason == "the server is not ready: models of the start are being loaded"
    # Calls do not wait, nor does a model for the others.
    assert held.http.post("/v2/models/digits/infer", json=REQUEST).status_code == 200
    wait_until(lambda: held.http.get("/v2/models/digits/ready").is_success, WAIT_S, "the model is ready")
    assert held.readiness() == not_ready

    held.restart_gateway()
    assert held.readiness() == not_ready

    held.end_loading()
    wait_until(lambda: held.readiness() == ready, WAIT_S, "the server is ready")

    held.restart_gateway()
    wait_until(lambda: held.readiness() == ready, WAIT_S, "a gateway that is started after the loading is ready")


def test_a_gateway_without_a_supervisor_waits_for_no_models() -> None:
    assert not Preloads().loading()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_load_without_end_is_waited_for_within_a_limit() -> None:
    unlimited, limited = PreloadPipe(limit_s=math.inf), PreloadPipe(limit_s=0.01)
    waits = Preloads(os.dup(unlimited.read_fd))
    gives_up, restarted = Preloads(os.dup(limited.read_fd)), Preloads(os.dup(limited.read_fd))
    async with asyncio.timeout(120):
        while gives_up.loading():
            await asyncio.sleep(0.01)
    assert not restarted.loading()
    assert waits.loading()
    unlimited.close()
    limited.close()
    assert not waits.loading()
