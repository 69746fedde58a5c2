"""Log levels of an installation on two machines: two homes, with gateways and workers of their own, over one Redis."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.log_levels import LEVELS_LIFE_S
from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import RedisAddress, client
from tests.kit.redis_server import redis_server
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

PATH = "/admin/v1/log-level"
NAME = "twomachines"
NONE = {"gateway": None, "worker": None, "controller": None}


@contextmanager
def machine(folder: Path, address: RedisAddress, *, controller: bool = False) -> Iterator[Stack]:
    shm_dir = folder / "shm"
    shm_dir.mkdir(parents=True)
    settings = {"redis_url": address.url, "installation_name": NAME, "shm_dir": shm_dir}
    with running_stack(folder, controller=controller, settings=settings) as stack:
        stack.redis = client(address)
        yield stack


def said(stack: Stack, process: str) -> list[str]:
    """Return the levels that a process of this name took, its predecessors included."""
    text = (stack.home / "logs" / f"{process}.log").read_text()
    return re.findall(r"millstream.process: log level: ([a-z ]+?)(?: \(|\n)", text)


def wait_for(stack: Stack, process: str, expected: list[str]) -> None:
    wait_until(lambda: said(stack, process) == expected, what=f"{process} of {stack.home} says {expected}")


def test_one_call_reaches_all_machines_and_restarted_processes(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    with ExitStack() as stacks:
        address = stacks.enter_context(redis_server(choose_binary(), tmp_path / "redis"))
        here = stacks.enter_context(machine(tmp_path / "a", address, controller=True))
        there = stacks.enter_context(machine(tmp_path / "b", address))
        assert there.http.get(PATH).json() == NONE
        changes = {"gateway": "debug", "worker": "debug", "controller": "error"}
        assert here.http.put(PATH, json=changes).json() == changes
        assert there.http.get(PATH).json() == changes
        for stack in (here, there):
            wait_for(stack, "gateway-0", ["debug"])
            wait_for(stack, "cpu-0", ["debug"])
        assert 0 < int(here.redis.ttl(InstallationKeys(NAME).log_levels)) <= LEVELS_LIFE_S

        before = there.pids()["cpu-0"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: there.pids().get("cpu-0", before) != before, what="a new worker")
        wait_for(there, "cpu-0", ["debug", "debug"])

        assert there.http.put(PATH, json=dict.fromkeys(changes)).json() == NONE
        for stack in (here, there):
            wait_for(stack, "gateway-0", ["debug", "the default"])
        wait_for(here, "cpu-0", ["debug", "the default"])


def test_levels_of_other_releases_and_without_redis(tmp_path: Path) -> None:
    """A level that this release does not know is the default; without Redis the call is refused."""
    (tmp_path / "redis").mkdir()
    with ExitStack() as stacks:
        servers = stacks.enter_context(ExitStack())
        address = servers.enter_context(redis_server(choose_binary(), tmp_path / "redis"))
        with machine(tmp_path / "a", address) as stack:
            stack.redis.hset(InstallationKeys(NAME).log_levels, mapping={"gateway": "loud", "redis": "debug"})
            assert stack.http.get(PATH).json() == NONE
            assert stack.http.put(PATH, json={"worker": "warning"}).json() == NONE | {"worker": "warning"}
            wait_for(stack, "cpu-0", ["warning"])
            servers.close()
            assert stack.http.put(PATH, json={"worker": None}).status_code == 503
            fresh = stacks.enter_context(redis_server(choose_binary(), tmp_path / "redis"))
            assert fresh == address
            wait_for(stack, "cpu-0", ["warning", "the default"])  # Redis lost its data
            assert said(stack, "gateway-0") == []
