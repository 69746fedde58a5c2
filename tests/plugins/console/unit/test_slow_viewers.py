"""A console that does not read: it skips samples, and takes no memory for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millstream.plugins.console.gateway.hub import Hub
from tests.kit.application import OPERATOR, Application

pytestmark = pytest.mark.anyio
WAIT_S = 60.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_viewer_that_does_not_read_gets_the_newest_sample_next(tmp_path: Path) -> None:
    application = Application(tmp_path)
    hub = application.app.state.deps.part(Hub)
    await hub.start()
    sent: asyncio.Queue[Any] = asyncio.Queue()
    reads, gone = asyncio.Event(), asyncio.Event()
    reads.set()

    async def send(message: Any) -> None:
        await reads.wait()
        await sent.put(message)

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    names = {"host": "127.0.0.1", **OPERATOR}
    scope = {
        "type": "http",
        "method": "GET",
        "scheme": "http",
        "path": "/console/api/events",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in names.items()],
        "client": ("127.0.0.1", 5000),
    }
    async with asyncio.timeout(WAIT_S):
        task = asyncio.create_task(application.app(scope, receive, send))
        for _ in range(3):  # the head, the time after which a browser comes back, a first sample
            await sent.get()
        reads.clear()
        for number in range(100):
            hub.publish({"at": number})
            await asyncio.sleep(0)
        reads.set()
        messages = [await sent.get(), await sent.get()]
        assert [one["body"].split(b"data: ")[1].strip() for one in messages] == [b'{"at":0}', b'{"at":99}']
        gone.set()
        await task
    assert not hub.viewed, "a reader that went is forgotten"
    await hub.stop()
