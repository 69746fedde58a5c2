"""Tensors that travel through the embedded Redis: when they are gone, so is the memory that they took."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.kit import models, v2
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

MIB = 1 << 20
REQUESTS = 6
OUTPUTS = 48 * MIB  # of each


def memory(stack: Stack, what: str) -> int:
    return int(stack.redis.info("memory")[what])


def test_the_memory_of_a_burst_is_given_back(tmp_path: Path) -> None:
    with running_stack(tmp_path, settings={"shm_bytes_max": 0}) as stack:
        stack.push("blank", models.blank(tmp_path / "blank.onnx"), config='{"batching": false}')
        before = memory(stack, "used_memory_rss")
        body = v2.request({"count": np.array([OUTPUTS // 4])}, parameters=v2.PATIENT)
        sent = [stack.send("/v2/models/blank/infer", *body) for _ in range(REQUESTS)]
        try:
            for connection in sent:
                reply = connection.getresponse()
                assert (reply.status, len(reply.read()) > OUTPUTS) == (200, True)
        finally:
            for connection in sent:
                connection.close()
        # How much of it Redis holds at once depends on how fast the replies are fetched; what may stay are the small
        # pieces between the large ones.
        peak = memory(stack, "used_memory_peak")
        assert peak > OUTPUTS
        wait_until(lambda: memory(stack, "used_memory_rss") < before + peak / 2, what="Redis gave its memory back")
