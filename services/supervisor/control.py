"""The control socket: commands send a request to a running supervisor and receive progress events.

command: {"restart": "all"}          -> <run>/control.sock ->   supervisor
         {"event": "replaced", …} …  <-      JSON lines    <-   … until "done" or "failed"
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from millstream.services.errors import Code, Failure, invalid

REQUEST_S_MAX = 5.0

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
            await self._handle(await _read_request(reader), report)
        except Failure as failure:
            report({"event": "failed", "code": failure.code.value, "message": failure.message})
        except OSError:
            pass  # the command has disconnected
        else:
            report({"event": "done"})
        finally:
            writer.close()


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

    Raises the supervisor's Failure, UNAVAILABLE if it ends early, and OSError if no process listens.
    """
    reader, writer = await asyncio.open_unix_connection(path)
    with contextlib.closing(writer):
        writer.write(json.dumps(request).encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                event: Event = json.loads(line)
                if event["event"] == "failed":
                    raise Failure(Code(event["code"]), event["message"])
                if event["event"] == "done":
                    return
                yield event
    raise Failure(Code.UNAVAILABLE, "the supervisor ended before the request was complete")
