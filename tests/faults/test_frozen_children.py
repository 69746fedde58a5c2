"""A child of `millstream up` that is frozen is killed and replaced, of whatever kind; what only looks frozen is not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx2

from tests.kit import models
from tests.kit.scale_model import BODIES
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

KINDS = ("cpu-0", "gateway-0", "redis")


def answers(stack: Stack) -> bool:
    """Whether a call on a new connection is answered within a second."""
    body, headers = BODIES[0]
    try:
        return httpx2.post(
            f"{stack.url}/v2/models/m/infer", content=body, headers=headers, timeout=1, trust_env=False
        ).is_success
    except httpx2.HTTPError:
        return False


def test_a_frozen_child_of_each_kind_is_replaced_and_others_are_not(tmp_path: Path) -> None:
    """With the only worker, the only gateway and Redis frozen, nobody has to act."""
    with running_stack(
        tmp_path, pools="cpu=1:2", controller=True, models={"m": models.scale(tmp_path / "m.onnx")}
    ) as stack:
        before = stack.pids()
        assert before.keys() == set(KINDS)
        for pid in before.values():
            os.kill(pid, signal.SIGSTOP)
        stack.reconnect()  # its connection is to the frozen gateway
        for name in KINDS:
            stack.wait_for_line(f"{name} has shown no sign of life for")
            stack.wait_for_line(f"{name} was ended by SIGKILL: restarting it")
        wait_until(lambda: answers(stack), what="calls are answered again")
        after = wait_until(lambda: pids if (pids := stack.pids()).keys() == set(KINDS) else None)
        assert not set(before.values()) & set(after.values())
        stack.settled("m", 1)
        assert not any("blamed" in line or "at fault" in line for line in stack.lines)
        assert stack.pids() == after  # those that show signs stay
