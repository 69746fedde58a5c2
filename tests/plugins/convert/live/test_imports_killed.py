"""kill -9 at each stage of an import: nothing runs on or is left, the version before serves, the next one works."""

from __future__ import annotations

import http.client
import itertools
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from tests.kit import v2
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_for_none, wait_until

VERSIONS = "/admin/v1/models/iris/versions"
QUERY = "?allow_pickle=true&wait=240"
BODY = v2.request({"input": np.ones((1, 4), np.float32)})
IMPORT = b"millstream.plugins.convert.import_process"
CHECK = b"millstream.services.ingest.checker"
SEEDS = itertools.count()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("imports")) as stack:
        reply = stack.http.post(VERSIONS + QUERY, content=content())
        assert reply.status_code == 201, reply.text
        yield stack


def content() -> bytes:
    """Return another model each time."""
    generator = np.random.default_rng(next(SEEDS))
    return pickle.dumps(LogisticRegression().fit(generator.random((30, 4)), np.arange(30) % 3))


def of_stack(stack: Stack, module: bytes) -> list[int]:
    """Return the processes that run a module for this stack, whatever their parent is."""
    home, found = os.fsencode(stack.home), []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            command = (entry / "cmdline").read_bytes()
            if module in command and home in command:
                found.append(int(entry.name))
    return found


def is_confined(pid: int) -> bool:
    with suppress(OSError):
        return "Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text()
    return False


def stopped(stack: Stack, module: bytes, ready: Callable[[int], bool] = lambda _: True) -> int | None:
    """Stop a process of a module, if one runs that is `ready`; return it."""
    for pid in of_stack(stack, module):
        if ready(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                return pid
    return None


@contextmanager
def uploads(stack: Stack) -> Iterator[list[int]]:
    """Upload during the block, in which the gateway dies, one after the other: a check can be too short to be seen.

    Yields the statuses of those that were answered.
    """
    answered: list[int] = []

    def send() -> None:
        with suppress(OSError, http.client.HTTPException):
            while True:
                connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=240)
                with closing(connection):
                    connection.request("POST", VERSIONS + QUERY, content(), stack.headers)
                    reply = connection.getresponse()
                    reply.read()
                    answered.append(reply.status)

    thread = threading.Thread(target=send, name="uploads")
    thread.start()
    yield answered
    thread.join(240)
    assert not thread.is_alive()


def gateway_killed(stack: Stack) -> None:
    gateway = stack.pids()["gateway-0"]
    os.kill(gateway, signal.SIGKILL)
    wait_until(lambda: stack.pids().get("gateway-0", gateway) != gateway)
    stack.reconnect()
    wait_until(lambda: stack.http.get("/v2/health/ready").status_code == 200)


def is_as_before(stack: Stack, versions: int) -> None:
    """Check that nothing is left of an import, that the version before serves, and that the next import works."""
    wait_for_none(lambda: of_stack(stack, IMPORT) + of_stack(stack, CHECK))
    wait_for_none(lambda: list((stack.home / "repository" / ".staging").iterdir()))
    assert stack.http.post("/v2/models/iris/infer", content=BODY[0], headers=BODY[1]).status_code == 200
    wait_until(lambda: count(stack) == versions, what="no upload is listed any longer")
    reply = stack.http.post(VERSIONS + QUERY, content=content())
    assert reply.status_code == 201, reply.text
    assert stack.http.delete(f"{VERSIONS}/{reply.json()['version']}").status_code in {200, 204, 409}


def count(stack: Stack) -> int:
    return len(stack.http.get("/admin/v1/models/iris").json()["versions"])


@pytest.mark.parametrize("confined", [False, True], ids=["at its start", "in its sandbox"])
def test_an_import_ends_with_a_gateway_that_is_killed(stack: Stack, confined: bool) -> None:
    """A process that has not asked the kernel yet to end with its parent must find that its parent is gone."""
    versions = count(stack)
    with uploads(stack) as answered:
        ready = is_confined if confined else lambda _: True
        importing = wait_until(lambda: stopped(stack, IMPORT, ready), what="the import runs")
        gateway_killed(stack)
    with suppress(ProcessLookupError):
        os.kill(importing, signal.SIGCONT)
    is_as_before(stack, versions + answered.count(201))


def test_an_upload_that_is_half_received_leaves_nothing_of_a_gateway_that_is_killed(stack: Stack) -> None:
    versions = count(stack)
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=240)
    connection.putrequest("POST", VERSIONS + QUERY)
    connection.putheader("Content-Length", str(64 << 20))
    connection.putheader("Authorization", stack.headers["Authorization"])
    connection.endheaders()
    connection.send(content() + bytes(8 << 20))
    wait_until(lambda: list((stack.home / "repository" / ".staging").iterdir()), what="it is received")
    gateway_killed(stack)
    connection.close()
    is_as_before(stack, versions)


def test_a_check_ends_with_a_gateway_that_is_killed(stack: Stack) -> None:
    versions = count(stack)
    with uploads(stack) as answered:
        checking = wait_until(lambda: stopped(stack, CHECK), what="the check runs")
        gateway_killed(stack)
    with suppress(ProcessLookupError):
        os.kill(checking, signal.SIGCONT)
    is_as_before(stack, versions + answered.count(201))


def test_an_import_that_is_killed_is_refused_in_one_line(stack: Stack) -> None:
    versions = count(stack)
    killed: list[int] = []

    def kill() -> None:
        pid = wait_until(lambda: next(iter(of_stack(stack, IMPORT)), None), what="the import runs")
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    thread = threading.Thread(target=kill)
    thread.start()
    reply = stack.http.post(VERSIONS + QUERY, content=content())
    thread.join(240)
    assert killed
    assert reply.status_code == 400, reply.text
    assert "was ended by signal 9" in reply.json()["error"]
    is_as_before(stack, versions)
