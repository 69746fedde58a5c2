"""Redis comes back, with nothing of what it had, or with all of it: what was accepted is answered."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from millstream.services.queue.server import (
    choose_binary,
    remove_socket,
    server_command,
    socket_path,
    wait_until_answers,
)
from millstream.services.queue.url import RedisAddress, client
from tests.kit import models
from tests.kit.load import constant_load
from tests.kit.redis_server import START_S_MAX
from tests.kit.scale_model import BODIES, check_answers
from tests.kit.stack import running_stack, sigstopped
from tests.kit.wait import wait_until


def started(folder: Path) -> subprocess.Popen[bytes]:
    """A server that writes down each change before it answers."""
    path = socket_path(folder)
    durable = ("--appendonly", "yes", "--appendfsync", "always")
    process = subprocess.Popen(
        [*server_command(choose_binary().path, path, folder), *durable], stdout=subprocess.DEVNULL
    )
    asyncio.run(wait_until_answers(RedisAddress.unix(str(path)), START_S_MAX))
    return process


@pytest.mark.parametrize("how", ["killed", "flushed"])
def test_redis_forgets_everything_under_load(tmp_path: Path, how: str) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, gateways=2, pools="cpu=2", models={"steady": path}) as stack:
        pid = stack.pids()["redis"]
        with constant_load(stack.port, "/v2/models/steady/infer", BODIES) as load:
            load.more(100)
            if how == "killed":
                os.kill(pid, signal.SIGKILL)
                stack.wait_for_line("redis was ended by SIGKILL: restarting it")
                wait_until(lambda: stack.pids().get("redis", pid) != pid)
            else:
                stack.redis.flushall()
            load.more(100)
            stack.settled("steady", 1)
            load.more(100)
        check_answers(load)


def test_redis_comes_back_with_its_data(tmp_path: Path) -> None:
    """What waited in it is still there, and its gateways put it again all the same: each caller gets one answer."""
    path = models.scale(tmp_path / "m.onnx")
    folder = tmp_path / "redis"
    folder.mkdir()
    server = started(folder)
    address = RedisAddress.unix(str(socket_path(folder)))
    try:
        settings = {"redis_url": address.url, "queue_direct": False}
        with running_stack(tmp_path, gateways=2, pools="cpu=2", models={"steady": path}, settings=settings) as stack:
            stack.redis = client(address)
            with constant_load(stack.port, "/v2/models/steady/infer", BODIES) as load:
                load.more(100)
                with sigstopped(*(pid for name, pid in stack.pids().items() if name.startswith("cpu-"))):
                    wait_until(lambda: list(stack.redis.scan_iter("ms:*:stream:*")), what="a stream")
                    (stream,) = stack.redis.scan_iter("ms:*:stream:*")
                    wait_until(lambda: stack.redis.xlen(stream) > 0, what="put")
                    server.kill()
                    server.wait()
                    server = started(folder)
                    assert stack.redis.xlen(stream) > 0, "it has what it had"
                load.more(200)
                stack.settled("steady", 1)
                load.more(100)
            check_answers(load)
    finally:
        server.terminate()
        assert server.wait(120) == 0
        remove_socket(socket_path(folder), folder)
