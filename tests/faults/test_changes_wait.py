"""Changes that wait for the repository's lock, which another process holds, delay nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import pytest

from millstream.services.process.threads import STORAGE_THREADS_MAX
from millstream.services.repository.disk import locked
from tests.kit import models, v2
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

CHANGES = 40  # more than a gateway has threads of any kind
COLUMNS = 1 << 16  # a request of 256 KB is read in a thread


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running_stack(
        tmp_path, models={"wide": models.identity(tmp_path / "wide.onnx", "FP32", ("N", COLUMNS))}
    ) as it:
        yield it


def test_changes_that_wait_delay_no_other_work(stack: Stack) -> None:
    rows = np.ones((1, COLUMNS), np.float32)
    body, headers = v2.request({"x": rows})

    def change(number: int) -> httpx2.Response:
        return stack.http.patch("/admin/v1/models/wide", json={"instances_max": number + 1}, timeout=60)

    with ThreadPoolExecutor(CHANGES) as pool:
        with locked(stack.home / "repository" / ".lock"):
            changes = [pool.submit(change, number) for number in range(CHANGES)]
            wait_until(lambda: _waiting(stack) == STORAGE_THREADS_MAX, what="changes wait for the lock")
            reply = stack.http.post("/v2/models/wide/infer", content=body, headers=headers)
            assert reply.status_code == 200, reply.text
            page = stack.http.get("/metrics")
            assert page.status_code == 200
            assert not any(one.done() for one in changes)
        assert {one.result().status_code for one in changes} == {200}


def _waiting(stack: Stack) -> int:
    """Return how many threads of the gateway have the lock's file open."""
    files = Path(f"/proc/{stack.pids()['gateway-0']}/fd")
    return [one.readlink().name for one in files.iterdir() if one.is_symlink()].count(".lock")
