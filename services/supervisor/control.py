"""The control socket: commands send a request to a running supervisor and receive progress events.

command: {"restart": "all"}          -> <run>/control.sock ->   supervisor
         {"event": "accepted"}       <-      JSON lines    <-   at once
         {"event": "replaced", …} …  <-                    <-   … until "done" or "failed"
         {"event": "alive"}          <-                    <-   every HEARTBEAT_S meanwhile
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from millstream.services.errors import Code, Failure, invalid

REQUEST_S_MAX = 5.0
ACCEPTED_S_MAX = 10.0  # until the supervisor's first event; beyond, the command gives up
HEARTBEAT_S = 2.0
SILENCE_S_MAX = 30.0  # between two events of a supervisor that sends heartbeats; beyond, the command gives up

#: events about the connection, which are not the caller's
_OF_CONNECTION = frozenset({"accepted", "alive"})

Event = dict[str, Any]
ReportEvent = Callable[[Event], None]
#: handles a request, reports events, and returns when the request is complete. Raises Failure.
Handle = Callable[[Event, ReportEvent], Awaitable[None]]


class ControlSocket:
    """The supervisor's end. If a command disconnects, its request continues."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def open(self, path: Path) -> None:
        """Listen on `path`, in a folder that is private to this user."""
        self._server = await asyncio.start_unix_server(self._on_connection, path)

    async def close(self) -> None:
        """Stop listening and end all connections; their last events were written before."""
        if self._server is not None:
            self._server.close()
        await asyncio.sleep(0)
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer), name="control")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def report(event: Event) -> None:
            if not writer.is_closing():
                writer.write(json.dumps(event).encode() + b"\n")

        try:
            request = await _read_request(reader)
            report({"event": "accepted"})
            if writer.is_closing():  # this process was frozen, and the command gave up: its caller expects no restart
                return
            await self._handle_alive(request, report)
        except Failure as failure:
            report({"event": "failed", "code": failure.code.value, "message": failure.message})
        except OSError:
            pass  # the command has disconnected
        else:
            report({"event": "done"})
        finally:
            writer.close()

    async def _handle_alive(self, request: Event, report: ReportEvent) -> None:
        """Carry out a request, and report meanwhile that this process is alive: one process may drain for minutes."""
        beating = asyncio.create_task(_beat(report), name="control heartbeat")
        try:
            await self._handle(request, report)
        finally:
            beating.cancel()


async def _beat(report: ReportEvent) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        report({"event": "alive"})


async def _read_request(reader: asyncio.StreamReader) -> Event:
    try:
        async with asyncio.timeout(REQUEST_S_MAX):
            request = json.loads(await reader.readline())
    except (ValueError, TimeoutError) as error:
        raise invalid("not a line of JSON") from error
    if not isinstance(request, dict):
        raise invalid("not a JSON object")
    return request


async def send_request(path: Path, request: Event) -> AsyncIterator[Event]:
    """Send `request` to the supervisor that listens on `path`; yield its events as they arrive.

    Raises the supervisor's Failure, UNAVAILABLE if it ends early or is silent for too long, and OSError if no process
    listens.
    """
    reader, writer = await asyncio.open_unix_connection(path)
    wait_s: float | None = ACCEPTED_S_MAX
    heartbeats = False  # a supervisor of an earlier release sends none: only its first event, sent at once, has a limit
    with contextlib.closing(writer):
        writer.write(json.dumps(request).encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            while line := await _read_event(reader, writer, wait_s):
                event: Event = json.loads(line)
                heartbeats = heartbeats or event["event"] == "accepted"
                wait_s = SILENCE_S_MAX if heartbeats else None
                if event["event"] == "failed":
                    raise Failure(Code(event["code"]), event["message"])
                if event["event"] == "done":
                    return
                if event["event"] not in _OF_CONNECTION:
                    yield event
    raise Failure(Code.UNAVAILABLE, "the supervisor ended before the request was complete")


async def _read_event(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait_s: float | None) -> bytes:
    """Return the next line; empty at the end. Raises Failure(UNAVAILABLE) after `wait_s`; None: there is no limit."""
    if wait_s is None:
        return await reader.readline()
    for _ in range(2):  # a command that was itself stopped for a while looks again at what came meanwhile
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s / 2):
                return await reader.readline()
    pid = _peer_pid(writer)
    raise Failure(
        Code.UNAVAILABLE,
        f"`millstream up` (pid {pid}) has not answered for {wait_s:g} s and may be frozen: continue it "
        f"(`kill -CONT {pid}`), or wait until the machine has less to do; then look at its output, and try again",
    )


def _peer_pid(writer: asyncio.StreamWriter) -> int:
    """Return the pid of the process that listens on the other end of a UNIX socket (unix(7): SO_PEERCRED)."""
    peer: socket.socket = writer.get_extra_info("socket")
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])
