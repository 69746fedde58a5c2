"""Two hosts of one installation: each runs `millstream up` with its own home, over one Redis and one repository."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import RedisAddress, client
from tests.kit import models, v2
from tests.kit.redis_server import redis_server
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

NODE = platform.node()


@pytest.fixture
def address(tmp_path: Path) -> Iterator[RedisAddress]:
    (tmp_path / "redis").mkdir()
    with redis_server(choose_binary(), tmp_path / "redis") as address:
        yield address


def prepared(folder: Path, repository: Path) -> Path:
    """Make the folders of a host that shares `repository`; return that of its shared memory."""
    (folder / "home").mkdir(parents=True)
    repository.mkdir(exist_ok=True)
    (folder / "home" / "repository").symlink_to(repository)
    (folder / "shm").mkdir()
    return folder / "shm"


@contextmanager
def gateway_host(tmp_path: Path, name: str, address: RedisAddress) -> Iterator[Stack]:
    shm_dir = prepared(tmp_path / name, tmp_path / "repository")
    with running_stack(tmp_path / name, settings={"redis_url": address.url, "shm_dir": shm_dir}) as stack:
        stack.redis = client(address)
        yield stack


def workers(stack: Stack) -> dict[str, dict[str, Any]]:
    """Return the workers that a gateway lists, by name."""
    return {one["id"].rpartition("-")[0]: one for one in stack.http.get("/admin/v1/workers").json()["workers"]}


def until_listed(stack: Stack, names: set[str]) -> None:
    wait_until(lambda: workers(stack).keys() == names, what=f"{names} are listed")


def measured(stack: Stack) -> set[str]:
    """Return the names of workers in the metrics of a host."""
    return wait_until(lambda: stack.metrics().label_values("worker"), what="its worker is measured")


def test_the_names_of_workers_tell_hosts_apart(tmp_path: Path, address: RedisAddress) -> None:
    here_name, there_name = f"cpu-0@{NODE}", f"cpu-0@{NODE}.2"
    with gateway_host(tmp_path, "a", address) as here:
        here.push("scale", models.scale(tmp_path / "scale.onnx"))
        with gateway_host(tmp_path, "b", address) as there:
            until_listed(here, {here_name, there_name})
            until_listed(there, {here_name, there_name})
            assert measured(here) == {here_name}
            assert measured(there) == {there_name}
            placement = here.http.get("/admin/v1/placement").json()
            assert {one["id"].rpartition("-")[0] for one in placement["workers"]} == {here_name, there_name}

            before, pid = workers(there)[there_name], there.pids()["cpu-0"]
            os.kill(pid, signal.SIGKILL)
            wait_until(
                lambda: (
                    workers(there).keys() == {here_name, there_name}
                    and workers(there)[there_name]["id"] != before["id"]
                ),
                what="it is started again under its name, and the dead one is not listed",
            )
            there.wait_for_line("cpu-0 was ended by SIGKILL")  # in its own home it needs no host
        body, headers = v2.request({"x": np.ones((1, 2), np.float32)})
        assert here.http.post("/v2/models/scale/infer", content=body, headers=headers).status_code == 200
