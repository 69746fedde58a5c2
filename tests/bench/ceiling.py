"""The ceiling C: an ASGI application on uvicorn that only reads each request and answers `{}`, the least possible work.

python -m tests.bench.ceiling          # prints `ready http://…`
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/json"), (b"content-length", b"2")],
}
BODY = {"type": "http.response.body", "body": b"{}"}


async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """Read the whole body and answer `{}`."""
    while (await receive()).get("more_body", False):
        pass
    await send(HEAD)
    await send(BODY)


async def main() -> None:
    """Serve on a free port until SIGTERM."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http="httptools", lifespan="off", log_level="warning", access_log=False)
    print(f"ready http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await uvicorn.Server(config).serve([listener])


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
