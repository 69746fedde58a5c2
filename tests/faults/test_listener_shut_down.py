"""A listening socket that somebody shut down is replaced, and orphans of children are ended."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import httpx2
import pytest

from tests.kit.stack import WAIT_S, running_stack
from tests.kit.wait import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no pidfd_getfd")

_PIDFD_GETFD = 438
ORPHAN = """
import asyncio, os, select, sys
from asyncio.subprocess import PIPE
from millstream.services.supervisor.deaths import Orphans

LEAVE = '''
import os, time
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    time.sleep(900)
'''

async def main():
    orphans = Orphans(lambda: ())
    orphans.start()
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", LEAVE, stdout=PIPE)
    pid = int(await parent.stdout.readline())
    process = os.pidfd_open(pid)
    await parent.wait()
    if sys.argv[1] == "while it serves":
        while os.path.exists(f"/proc/{pid}"):
            await asyncio.sleep(0.1)
    await orphans.stop()
    ended, _, _ = select.select([process], [], [], 60)  # it is killed, and may not have ended yet
    print(bool(ended))

asyncio.run(main())
"""


def test_the_port_accepts_connections_again(tmp_path: Path) -> None:
    with running_stack(tmp_path) as stack:
        with closing(listener_of(stack.process.pid, stack.port)) as listener:
            listener.shutdown(socket.SHUT_RDWR)
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{stack.url}/v2/health/live", timeout=WAIT_S, trust_env=False)

        def answers() -> bool:
            with suppress(httpx2.TransportError):
                return httpx2.get(f"{stack.url}/v2/health/ready", timeout=WAIT_S, trust_env=False).status_code == 200
            return False

        wait_until(answers, what="answers on the port")
        stack.reconnect()


@pytest.mark.parametrize("when", ["while it serves", "when it stops"])
def test_what_a_child_left_behind_is_ended(when: str) -> None:
    command = [sys.executable, "-c", ORPHAN, when]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert done.stdout.split()[-1] == "True"


def listener_of(pid: int, port: int) -> socket.socket:
    """Return the socket with which a process listens on a port: the same one, not another that is bound to it."""
    libc, process = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    with closing(os.fdopen(process)):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if not str(entry.readlink()).startswith("socket:"):
                    continue
                found = socket.socket(fileno=libc.syscall(_PIDFD_GETFD, process, int(entry.name), 0))
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and str(port) in str(found.getsockname()):
                    return found
                found.close()
    raise AssertionError(f"process {pid} does not listen on port {port}")
