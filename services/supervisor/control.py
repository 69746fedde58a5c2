"""The control socket: how a command tells a running supervisor what to do, and hears how it goes.

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

ASK_S_MAX = 5.0

Event = dict[str, Any]
Tell = Callable[[Event], None]
#: a request, and where to tell what happens; it ends when all is done. Raises Failure.
Handle = Callable[[Event, Tell], Awaitable[None]]


class ControlSocket:
    """The supervisor's end. A command that goes away stops nothing: what was begun goes on."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def open(self, path: Path) -> None:
        """Listen on `path`, in a folder that is ours alone."""
        self._server = await asyncio.start_unix_server(self._on_connection, path)

    async def close(self) -> None:
        """Take no more; who still listens has been told by now."""
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
        def tell(event: Event) -> None:
            if not writer.is_closing():
                writer.write(json.dumps(event).encode() + b"\n")

        try:
            await self._handle(await _asked(reader), tell)
        except Failure as failure:
            tell({"event": "failed", "code": failure.code.value, "message": failure.message})
        except OSError:
            pass  # gone already
        else:
            tell({"event": "done"})
        finally:
            writer.close()


async def _asked(reader: asyncio.StreamReader) -> Event:
    try:
        request = json.loads(await asyncio.wait_for(reader.readline(), ASK_S_MAX))
    except (ValueError, TimeoutError) as error:
        raise invalid("not a line of JSON") from error
    if not isinstance(request, dict):
        raise invalid("not a JSON object")
    return request


async def ask(path: Path, request: Event) -> AsyncIterator[Event]:
    """Send `request` to the supervisor that listens on `path`; what happens, as it happens.

    Raises Failure: what the supervisor says; UNAVAILABLE if it ends before all is done. Raises OSError if nobody listens.
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
    raise Failure(Code.UNAVAILABLE, "the supervisor ended before all was done")
