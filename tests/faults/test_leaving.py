"""After SIGTERM a server is not ready, and answers new connections until load balancers have noticed."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx2
import pytest

from tests.kit import models
from tests.kit.scale_model import BODIES
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

LONG_S = 240  # ended by the test


def status(stack: Stack, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> int:
    """Return the status of a call on a connection of its own; 0: it was refused."""
    try:
        reply = httpx2.request(
            "GET" if body is None else "POST",
            stack.url + path,
            content=body,
            headers=headers,
            timeout=60,
            trust_env=False,
        )
    except httpx2.ConnectError:
        return 0
    return reply.status_code


def infer(stack: Stack) -> int:
    return status(stack, "/v2/models/m/infer", *BODIES[0])


@pytest.mark.parametrize("gateways", [1, 2])
def test_after_sigterm_new_connections_are_answered_until_the_delay_is_over(tmp_path: Path, gateways: int) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, gateways=gateways, models={"m": path}, settings={"drain_delay_s": LONG_S}) as stack:
        assert infer(stack) == 200
        stack.process.send_signal(signal.SIGTERM)
        wait_until(lambda: {status(stack, "/v2/health/ready") for _ in range(8)} == {503})
        for _ in range(50):
            assert infer(stack) == 200
            assert status(stack, "/v2/health/live") == 200
        stack.process.send_signal(signal.SIGTERM)  # at once
        assert stack.end() == 130
        assert status(stack, "/v2/health/live") == 0


def test_the_delay_ends_and_the_drain_follows(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, models={"m": path}, settings={"drain_delay_s": 2}) as stack:
        assert stack.stop() == 0


def test_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, models={"m": path}, settings={"drain_delay_s": LONG_S}) as stack:
        assert stack.stop(signal.SIGINT) == 0
