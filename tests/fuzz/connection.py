"""What bytes may do to a connection: each request is answered or refused, the same however its bytes are cut.

bytes ─> socket ─> FastPathProtocol ─> Infer, lane, codec (tests.kit.loopback) or the ASGI application
      ─> replies ─> checked
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import re
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from millstream.gateway.app import build_app
from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.fast_path import fast_path_protocol
from millstream.gateway.connection.reply_order import is_complete
from millstream.services.metrics import catalogue
from tests.kit.application import Application
from tests.kit.loopback import Loopback

BODY_BYTES_MAX = 1 << 16
WAIT_S_MAX = 10.0
CUTS_MAX = 8
STATUSES = {100, 200, 307, 400, 401, 403, 404, 405, 413, 415, 501}
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
#: headers that differ from reply to reply
_OWN = re.compile(rb"\r\n(?:date|x-request-id): [^\r]+")
_NOT_HTTP = b"Invalid HTTP request received."
_ERRORS = logging.getLogger()


class _Loud(logging.Handler):
    """Keeps what was logged as an error: nothing that a client sends is one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(logging.Formatter().format(record))


class Connections:
    """A gateway's HTTP side in an event loop of its own, to which connections are made one after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loud = _Loud()
        _ERRORS.addHandler(self._loud)
        self._loop.set_exception_handler(lambda _, context: self._loud.records.append(repr(context)))
        self._home = Path(tempfile.mkdtemp(prefix="millstream-fuzz-"))
        self._loop.run_until_complete(self._open(self._home))

    def close(self) -> None:
        """Leave nothing in this process, and nothing on the disk."""
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        _ERRORS.removeHandler(self._loud)
        shutil.rmtree(self._home)

    async def _open(self, home: Path) -> None:
        self._loopback = Loopback(home / "loopback", request_bytes_max=BODY_BYTES_MAX)
        await self._loopback.open()
        application = Application(home / "application", admin_key="sesame", request_bytes_max=BODY_BYTES_MAX)
        app = build_app(dataclasses.replace(application.app.state.deps, infer=self._loopback.infer))
        self._receive_budget = ReceiveBudget(1 << 24)
        self._lane: type[Any] = fast_path_protocol(
            self._loopback.infer, BODY_BYTES_MAX, 100, self._receive_budget, ReplyBudget(1 << 30)
        )
        self._config = uvicorn.Config(
            app, http=self._lane, log_config=None, ws="none", lifespan="off", server_header=False
        )
        self._config.load()
        self._state = ServerState()

    def fuzz(self, data: bytes) -> None:
        """Send `data` in one piece and in several, which depend on it alone."""
        whole = self._loop.run_until_complete(self._talk([data]))
        cutter = random.Random(data)
        at = sorted(cutter.randrange(len(data) + 1) for _ in range(cutter.randint(1, CUTS_MAX)))
        pieces = [data[begin:end] for begin, end in zip([0, *at], [*at, len(data)], strict=True)]
        cut = self._loop.run_until_complete(self._talk([piece for piece in pieces if piece]))
        if whole is not None and cut is not None:
            assert cut == whole, pieces

    async def _talk(self, pieces: list[bytes]) -> bytes | None:
        """All that the server says to a client that sends `pieces`, waits for replies and leaves; no dates, no ids.

        None where that depends on when the pieces come: the last request is not whole, or ends in what is not HTTP, and
        a route of the application may answer before it has read so far.
        """
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            lane = self._lane(config=self._config, server_state=self._state, app_state={}, _loop=self._loop)
            await self._loop.connect_accepted_socket(lambda: lane, theirs)
            said = b""
            for piece in pieces:
                said += await self._send(ours, lane, piece)
            open_ended = lane._active is not None and not is_complete(lane._active)
        async with asyncio.timeout(WAIT_S_MAX):
            while lane in self._state.connections or self._state.tasks:
                await asyncio.sleep(0)
        self._check(said)
        return None if open_ended or _NOT_HTTP in said else _OWN.sub(b"", said)

    async def _send(self, ours: socket.socket, lane: Any, piece: bytes) -> bytes:
        """Send, and take what the server says until it owes nothing."""
        said = b""
        async with asyncio.timeout(WAIT_S_MAX):
            while piece:
                try:
                    piece = piece[ours.send(piece) :]
                except BlockingIOError:
                    await asyncio.sleep(0)
                except OSError:  # it has hung up
                    break
            # what was sent is read in the next turn, and answered in some that follow
            quiet = 0
            while quiet < 3:
                await asyncio.sleep(0)
                received = _received(ours)
                said += received
                quiet = 0 if received or _owes(lane) else quiet + 1
        return said

    def _check(self, said: bytes) -> None:
        assert self._loud.records == []
        statuses = {int(status) for status in _STATUS.findall(said)}
        assert statuses <= STATUSES, said
        assert self._receive_budget.bytes == 0
        page = self._loopback.tally.gauge(catalogue.REQUESTS_IN_FLIGHT)
        assert page._values[page._slot] == 0


def _received(ours: socket.socket) -> bytes:
    try:
        return ours.recv(1 << 16)
    except OSError:
        return b""


def _owes(lane: Any) -> bool:
    active = lane._active
    if lane.transport.is_closing() or active is None:
        return False
    return bool(lane.pipeline) or (not active.response_complete and is_complete(active))
