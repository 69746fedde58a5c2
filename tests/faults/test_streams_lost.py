"""Answers in parts, while workers and processes of functions die: no part is lost, doubled or out of order.

A stream that cannot go on ends with an error that names its last part; one without a part runs again.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_reply_ports import WAIT_S, Hosts, running
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

NUMBERS = """
import asyncio
from collections.abc import AsyncIterator

STREAMS = 256


async def predict(count: int, pause_s: float, wait_s: float = 0.0) -> AsyncIterator[int]:
    await asyncio.sleep(wait_s)
    for number in range(count):
        yield number
        await asyncio.sleep(pause_s)
"""
ENDED = re.compile(r"after part (\d+)|its process (was|ended)|worker was stopped")


class Reader(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, url: str, headers: Mapping[str, str], **numbers: float) -> None:
        super().__init__(daemon=True)
        document = json.dumps(numbers | {"parameters": {"timeout": 60_000_000}}).encode()
        self._request = urllib.request.Request(f"{url}/v2/models/numbers/generate_stream", document, dict(headers))
        self.parts: list[int] = []
        self.error = ""
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=WAIT_S) as reply:
                for line in reply:
                    if line.startswith(b"data: "):
                        self._take(json.loads(line[6:]))
        except urllib.error.HTTPError as error:
            self.error = error.read().decode()
        except OSError as error:
            self.error = repr(error)
        self.ended_at = time.monotonic()

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]
        else:
            self.parts.append(event["output"])

    def check(self, count: int) -> None:
        """Check that it has all parts, or those until its error, which names the last."""
        self.join(WAIT_S)
        assert not self.is_alive()
        assert self.parts == list(range(len(self.parts))), "no part is missing, doubled or out of order"
        if not self.error:
            assert len(self.parts) == count
            return
        found = ENDED.search(self.error)
        assert found is not None, self.error
        if found[1]:
            assert int(found[1]) == len(self.parts), "the error names the last part"


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running_stack(tmp_path, pools="cpu=2") as stack:
        path = tmp_path / "service.py"
        path.write_text(NUMBERS)
        stack.push("numbers", path)
        yield stack


def readers(stack: Stack, number: int, **numbers: float) -> list[Reader]:
    return [Reader(f"http://127.0.0.1:{stack.port}", stack.headers, **numbers) for _ in range(number)]


def test_a_killed_worker_ends_streams_that_began_and_others_run_again(stack: Stack) -> None:
    begun = readers(stack, 60, count=200, pause_s=0.05)
    later = readers(stack, 20, count=5, pause_s=0.01, wait_s=2.0)
    wait_until(lambda: all(len(one.parts) > 2 for one in begun), WAIT_S, "all streams have parts")
    os.kill(stack.pids()["cpu-0"], signal.SIGKILL)
    for one in begun:
        one.check(200)
    assert any(one.error for one in begun)
    assert not all(one.error for one in begun), "those of the other worker went on"
    for one in later:
        one.check(5)
        assert one.error == "", "no part had come: it ran again"


def test_a_killed_process_of_a_function_ends_its_streams_at_once(stack: Stack) -> None:
    begun = readers(stack, 40, count=400, pause_s=0.05)
    wait_until(lambda: all(len(one.parts) > 2 for one in begun), WAIT_S, "all streams have parts")
    killed = time.monotonic()
    for worker in ("cpu-0", "cpu-1"):
        for child in Path(f"/proc/{stack.pids()[worker]}/task").glob("*/children"):
            for pid in child.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
    for one in begun:
        one.check(400)
        assert "its process" in one.error
    assert max(one.ended_at for one in begun) - killed < 5, "within a second on a quiet machine"
    stack.settled("numbers", 1)
    [again] = readers(stack, 1, count=3, pause_s=0.0)
    again.check(3)
    assert again.error == "", "the instance is loaded again"


def test_a_worker_that_drains_ends_no_stream(stack: Stack) -> None:
    begun = readers(stack, 20, count=40, pause_s=0.05)
    wait_until(lambda: all(one.parts for one in begun), WAIT_S, "all streams have parts")
    os.kill(stack.pids()["cpu-0"], signal.SIGTERM)
    for one in begun:
        one.check(40)
        assert one.error == ""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with running(tmp_path) as hosts:
        path = tmp_path / "numbers.py"
        path.write_text(NUMBERS)
        hosts.machines.push(hosts.http, "numbers", path)
        yield hosts


def test_parts_of_a_worker_on_another_host_take_the_reply_port(hosts: Hosts) -> None:
    def reader(**numbers: float) -> Reader:
        return Reader(f"http://127.0.0.1:{hosts.port}", dict(hosts.http.headers), **numbers)

    several = [reader(count=50, pause_s=0.01) for _ in range(20)]
    for one in several:
        one.check(50)
        assert one.error == ""
    wait_until(lambda: hosts.entries() == 0, WAIT_S, "all leases are acknowledged")
    begun = [reader(count=400, pause_s=0.05) for _ in range(10)]
    wait_until(lambda: all(len(one.parts) > 2 for one in begun), WAIT_S, "all streams have parts")
    hosts.worker.kill()
    for one in begun:
        one.check(400)
        assert "the worker was lost after part" in one.error
