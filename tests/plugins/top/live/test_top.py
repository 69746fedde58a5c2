"""`millstream top` against a running product: in pipes, as JSON, as SVG, and in a terminal that Ctrl-C ends."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit import models, v2
from tests.kit.command_line import ROOT, WAIT_S, Millstream
from tests.kit.load import constant_load
from tests.kit.stack import Stack, running_stack
from tests.kit.tcp_proxy import TcpProxy
from tests.kit.wait import wait_until

ENTER_SCREEN, LEAVE_SCREEN, SHOW_CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


@pytest.fixture
def line(stack: Stack, tmp_path: Path) -> Millstream:
    stack.push("top", models.scale(tmp_path / "scale.onnx"))
    return Millstream(tmp_path, key=stack.key)


@contextmanager
def calls(stack: Stack) -> Iterator[None]:
    body = v2.request({"x": np.ones((1, 2), np.float32)})
    with constant_load(stack.port, "/v2/models/top/infer", [body], callers=2) as load:
        load.more(20)
        yield


def test_a_script_reads_rates_and_workers(stack, line):
    def seen() -> Any:
        """What it says of an interval with calls that both gateways were ready in: a busy machine has others."""
        found = line.json("top", "--interval", "0.5", "--endpoint", stack.url)
        rate = sum(one["requests_per_s"] for one in found["endpoints"] if one["model"] == "top")
        busy = sum(worker["busy"] for worker in found["workers"])
        return found if rate and busy and found["totals"]["gateways_ready"] == 2 else None

    with calls(stack):
        found = wait_until(seen, what="an interval with calls")
    assert found["server"] == stack.url
    assert found["interval_s"] >= 0.5
    [one] = [one for one in found["endpoints"] if one["model"] == "top"]
    assert one["requests_per_s"] > 0
    assert one["failed_per_s"] == one["invalid_per_s"] == 0
    assert 0 < one["p50_s"] <= one["p99_s"]
    assert one["batch_rows"] >= 1
    assert one["instances"] == 2
    assert found["totals"]["requests_per_s"] >= one["requests_per_s"]
    assert found["totals"]["redis_memory_bytes"] > 0
    assert [worker["worker"] for worker in found["workers"]] == ["cpu-0", "cpu-1"]
    for worker in found["workers"]:
        assert worker["busy"] >= 0
        assert worker["resident_bytes"] > 1 << 20


def test_a_pipe_gets_one_table_and_a_page_its_picture(stack, line, tmp_path):
    shown = line.ok("top", "--once", "-i", "0.1", "--svg", tmp_path / "top.svg", "--endpoint", stack.url)
    assert [word for word in ("MODEL", "top", "WORKER", "cpu-0", "cpu-1") if word not in shown] == []
    assert "\x1b" not in shown
    assert line.ok("top", "-i", "0.1", "--endpoint", stack.url).count("WORKER") == 1
    assert "font-face" not in (tmp_path / "top.svg").read_text()
    assert ET.parse(tmp_path / "top.svg").getroot().tag.endswith("svg")
    assert "--once" in line.fails("top", "--svg", tmp_path / "x.svg", "--endpoint", stack.url, code=2)


@contextmanager
def in_a_terminal(line: Millstream, url: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run `millstream top` in a terminal, which is as before at its end; yields it, and the terminal's other side."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    before = termios.tcgetattr(terminal)
    command = [sys.executable, "-m", "millstream.services.cli", "top", "-i", "0.1", "--endpoint", url]
    environment = {name: value for name, value in line.environment().items() if name != "COLUMNS"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment | {"TERM": "xterm-256color"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    ) as process:
        try:
            yield process, controller
        finally:
            process.kill()  # nothing, if it has ended
    assert termios.tcgetattr(terminal) == before
    os.close(terminal)
    os.close(controller)


@pytest.mark.parametrize("leave", ["ctrl-c", "q", "sigterm"])
def test_a_terminal_is_as_before_at_the_end(stack, line, leave):
    with in_a_terminal(line, stack.url) as (process, controller):
        first = read_until(controller, b"by rate", b"WORKER")
        assert first.index(ENTER_SCREEN) < first.index(b"WORKER")
        os.write(controller, b"s")  # the next column
        read_until(controller, b"by failed")
        if leave == "q":
            os.write(controller, b"q")
        else:
            process.send_signal(signal.SIGINT if leave == "ctrl-c" else signal.SIGTERM)
        assert b"Traceback" not in read_until(controller, LEAVE_SCREEN, SHOW_CURSOR)
        assert process.wait(WAIT_S) == {"q": 0, "ctrl-c": 130, "sigterm": 143}[leave]


def test_a_server_that_goes_and_comes_back_is_shown_again(stack, line):
    proxy = TcpProxy(stack.url.removeprefix("http://"))
    with in_a_terminal(line, f"http://{proxy.address}") as (process, controller):
        read_until(controller, b"cpu-1")
        proxy.close()
        assert b"cpu-1" in read_until(controller, b"no answer", b"cpu-1")  # what was known last
        proxy.open()
        written = b""
        while not any(b"WORKER" in one and b"no answer" not in one for one in pictures(written)):
            written += read_until(controller, b"WORKER")
        process.send_signal(signal.SIGINT)
        read_until(controller, LEAVE_SCREEN, SHOW_CURSOR)
        assert process.wait(WAIT_S) == 130
    proxy.close()


ADMIN = "the-admin-key-of-this-test"


def test_a_key_of_small_scope_is_shown_what_it_may_read(tmp_path):
    with running_stack(tmp_path, settings={"admin_key": ADMIN}) as stack:
        stack.push("top", models.scale(tmp_path / "scale.onnx"))
        line = Millstream(tmp_path)

        def key(*scopes: str) -> str:
            name = "-".join(scopes).translate(str.maketrans(":*", "--"))
            reply = stack.http.post("/admin/v1/keys", json={"name": name, "scopes": scopes})
            return str(reply.json()["key"])

        def shown(given: str) -> tuple[str, dict[str, Any]]:
            command = ("top", "-i", "0.1", "--endpoint", stack.url, "--key", given)
            return line.ok(*command), line.json(*command)

        page, found = shown(key("metrics"))
        assert "workers are not shown: " in page
        assert "lacks the scope 'models:read'" in page
        assert "no worker is running" not in page
        assert [one["model"] for one in found["endpoints"]] == ["top"]
        assert (found["no_series"], found["workers"]) == ("", [])
        page, found = shown(key("models:read"))
        assert "requests are not shown: " in page
        assert "lacks the scope 'metrics'" in page
        assert "no model is loaded" not in page
        assert [one["worker"] for one in found["workers"]] == ["cpu-0"]
        page, found = shown(key("metrics", "models:read"))
        assert "not shown" not in page
        infers = key("infer:*")
        refused = line.fails("top", "-i", "0.1", "--endpoint", stack.url, "--key", infers)
        assert "lacks the scope 'metrics'" in refused
        assert "lacks the scope 'models:read'" in refused
        assert "401" not in refused


def pictures(written: bytes) -> list[bytes]:
    """Return the pictures of which the beginning was written."""
    return written.split(b"millstream top")[1:]


def read_until(controller: int, *parts: bytes) -> bytes:
    """Read what a program writes to its terminal until these parts are in it."""
    written = b""
    until = time.monotonic() + WAIT_S
    while not all(part in written for part in parts):
        ready, _, _ = select.select([controller], [], [], until - time.monotonic())
        assert ready, written
        written += os.read(controller, 65536)
    return written


def test_a_wrong_server_ends_with_1(line):
    assert "127.0.0.1:1" in line.fails("top", "--once", "--endpoint", "http://127.0.0.1:1")
    assert json.loads(line.run("top", "--json", "--endpoint", "http://127.0.0.1:1").stdout)["error"]
