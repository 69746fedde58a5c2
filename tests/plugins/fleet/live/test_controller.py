"""Controllers that die, freeze or lose Redis: another one leads, and the earlier one orders nothing that counts."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import RedisAddress, client
from tests.kit.command_line import Millstream
from tests.kit.controllers import COMMAND
from tests.kit.models import scale
from tests.kit.redis_server import redis_server
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.wait import wait_until

WAIT_S = 120


class Controllers:
    """Controllers of one installation, over a Redis of its own."""

    def __init__(self, folder: Path, address: RedisAddress) -> None:
        self._folder = folder
        self._address = address
        self._started: list[subprocess.Popen[bytes]] = []
        self.keys = InstallationKeys("fleet")
        self.redis: redis.Redis = client(address)

        self.settings: dict[str, object] = {"home": folder / "home", "installation_name": "fleet"}

    def start(self) -> subprocess.Popen[bytes]:
        log = self._folder / f"controller-{len(self._started)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                COMMAND,
                env=os.environ
                | {"MILLSTREAM_REDIS_URL": self._address.url, "MILLSTREAM_LOG_FORMAT": "json"}
                | {f"MILLSTREAM_{name.upper()}": str(value) for name, value in self.settings.items()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def said(self, process: subprocess.Popen[bytes], text: str) -> int:
        """How many log lines of a process contain `text`. Every line has to be JSON."""
        lines = (self._folder / f"controller-{self._started.index(process)}.log").read_text().splitlines()
        return sum(text in json.loads(line)["message"] for line in lines)

    def token(self) -> int:
        """The token of the controller that leads; 0: none."""
        stored = self.redis.get(self.keys.leader)
        return int(stored.split(b" ")[0]) if isinstance(stored, bytes) else 0

    def until_leads(self, process: subprocess.Popen[bytes], times: int = 1) -> int:
        """Wait until a process leads; return its token."""
        wait_until(lambda: self.said(process, "leads with token") >= times, WAIT_S, "leads")
        return wait_until(self.token, WAIT_S, "leads, also if a busy machine let its lead end for a moment")

    def stop(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.terminate()
                assert process.wait(WAIT_S) == 0

    def end(self) -> None:
        self.stop()
        assert not self.redis.exists(self.keys.leader)

    def kill(self) -> None:
        for process in self._started:
            process.kill()
            process.wait(WAIT_S)
        self.redis.close()


@contextmanager
def running(folder: Path, address: RedisAddress) -> Iterator[Controllers]:
    controllers = Controllers(folder, address)
    try:
        yield controllers
        controllers.end()
    finally:
        controllers.kill()


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[Controllers]:
    with redis_server(choose_binary(), tmp_path) as address, running(tmp_path, address) as started:
        yield started


def test_another_controller_leads_after_a_kill_a_pause_and_a_stop(controllers):
    first = controllers.start()
    token = controllers.until_leads(first)
    second = controllers.start()
    wait_until(lambda: controllers.said(second, "starts"), WAIT_S, "second")

    first.kill()
    later = controllers.until_leads(second)
    assert later > token

    third = controllers.start()
    with sigstopped(second.pid):
        latest = controllers.until_leads(third)
        assert latest > later

    def led_again() -> bool:
        """The third may lose its lead to the second while a busy machine lets it wait."""
        return bool(controllers.said(second, "leads with token") > 1)

    wait_until(lambda: controllers.said(second, "leads now") or led_again(), WAIT_S, "the second knows")
    wait_until(lambda: controllers.token() >= latest, WAIT_S, "one of them leads")

    third.terminate()  # releases the lead: no lease has to expire
    assert third.wait(WAIT_S) == 0
    assert controllers.said(third, "released the lead") == 1 or led_again()
    assert controllers.until_leads(second, 2) > latest


def test_a_redis_that_restarts_empty_has_a_leader_again_with_a_higher_token(tmp_path):
    folder = tmp_path / "redis"
    folder.mkdir()
    with redis_server(choose_binary(), folder) as address:
        controllers = Controllers(tmp_path, address)
        process = controllers.start()
        token = controllers.until_leads(process)
    try:
        wait_until(lambda: controllers.said(process, "does not lead any longer"), WAIT_S, "noticed")
        with redis_server(choose_binary(), folder):
            controllers.redis.close()
            assert controllers.until_leads(process, 2) > token
            assert controllers.said(process, "cannot be renewed") >= 1
            controllers.end()
    finally:
        controllers.kill()


def leader(stack: Stack) -> str:
    """The name of the controller that leads; empty: none does."""
    found = stack.http.get("/admin/v1/placement").json()["leader"]
    return found["name"] if found else ""


def doctor(stack: Stack) -> dict[str, Any]:
    """What `millstream doctor` says about the controller."""
    checks = Millstream(stack.home).json("doctor")["checks"]
    [found] = [check for check in checks if check["name"] == "Controller"]
    return dict(found)


def warnings(stack: Stack) -> list[str]:
    """What is said when a minimum of instances is asked for."""
    found: list[str] = stack.http.patch("/admin/v1/models/scale", json={"instances_min": 1}).json()["warnings"]
    return found


def test_a_controller_beside_a_stack_takes_over_from_one_that_is_frozen_or_killed(tmp_path):
    with running_stack(tmp_path, controller=True, models={"scale": scale(tmp_path / "scale.onnx")}) as stack:
        first = wait_until(lambda: leader(stack), what="leads")

        def said() -> tuple[str, str]:
            found = doctor(stack)
            return found["state"], found["detail"].split()[0]

        wait_until(lambda: said() == ("ok", first), what="doctor names it")
        beside = Controllers(tmp_path, RedisAddress.unix(str(stack.socket)))
        beside.settings = {"home": stack.home, "installation_name": stack.installation}
        try:
            second = beside.start()
            wait_until(lambda: beside.said(second, "starts"), WAIT_S, "a second one")
            with sigstopped(stack.process.pid):  # the supervisor, in which the first one runs
                wait_until(lambda: leader(stack) not in {"", first}, WAIT_S, "the second leads")
                wait_until(lambda: beside.said(second, "leads with token"), WAIT_S, "it says so")
                # On a busy machine its lead may end for a moment, though nobody else takes it.
                wait_until(lambda: doctor(stack)["detail"].split()[0] == leader(stack), what="doctor names it")
                wait_until(lambda: warnings(stack) == [], what="a controller runs")
            second.kill()
            wait_until(lambda: leader(stack) == first, WAIT_S, "the first leads again")
            third = beside.start()
            wait_until(lambda: beside.said(third, "starts"), WAIT_S, "a third one")
            with sigstopped(stack.process.pid):
                wait_until(lambda: leader(stack) not in {"", first}, WAIT_S, "the third leads")
            beside.stop()
            wait_until(lambda: leader(stack) == first, WAIT_S, "that of the stack leads")
        finally:
            beside.kill()


def test_a_stack_has_a_controller_without_a_process_for_it(tmp_path):
    with running_stack(tmp_path, controller=True) as stack:
        wait_until(lambda: stack.metrics().value("millstream_controller_leads") == 1, what="leads")
        assert set(stack.pids()) == {"redis", "gateway-0", "cpu-0"}
        assert "millstream.controller" in (stack.home / "logs" / "supervisor.log").read_text()
