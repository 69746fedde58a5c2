"""tokenizer_thread: runs a version's tokenizer in a thread of its own, and for a bounded time.

A tokenizer.json comes with an upload: its regular expressions may not terminate on some text. A thread cannot be
killed, so each version has its own: one that hangs blocks its version's texts, but no other version and no shared
thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from millstream.services.errors import Code, Failure

T = TypeVar("T")

#: How long the texts of one request may take, waiting for the version's thread included; beyond it, EXPIRED.
SECONDS_MAX = 20.0
#: Versions whose tokenizers may run at once; beyond it, requests with texts are UNAVAILABLE.
VERSIONS_MAX = 16


class TokenizerThread:
    """Runs one tokenizer at a time for each version. Use it in one event loop.

    Args:
        seconds_max: how long the texts of one request may take, waiting for the version's thread included.
    """

    def __init__(self, seconds_max: float = SECONDS_MAX) -> None:
        self._seconds_max = seconds_max
        self._running: dict[str, asyncio.Future[None]] = {}  # content id -> done when its thread has ended

    async def run(self, content_id: str, work: Callable[[], T]) -> T:
        """Return what `work` returns. Raises what it raises, and Failure: EXPIRED, too slow; UNAVAILABLE, too many."""
        try:
            async with asyncio.timeout(self._seconds_max):
                while (before := self._running.get(content_id)) is not None:
                    await asyncio.shield(before)
                return await self._start(content_id, work)
        except TimeoutError:
            raise Failure(
                Code.EXPIRED,
                f"the texts took longer than {self._seconds_max:g} s to tokenize: send shorter ones, or tokens",
            ) from None

    def _start(self, content_id: str, work: Callable[[], T]) -> asyncio.Future[T]:
        if len(self._running) >= VERSIONS_MAX:
            raise Failure(Code.UNAVAILABLE, "too many texts are being tokenized: try again", retry_after_s=1)
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        ended = self._running[content_id] = loop.create_future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:
                tell: Callable[[], None] = partial(outcome.set_exception, error)
            else:
                tell = partial(outcome.set_result, result)
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(end, tell)

        def end(tell: Callable[[], None]) -> None:
            del self._running[content_id]
            ended.set_result(None)
            if not outcome.done():  # done: the request timed out or was cancelled
                tell()

        # A daemon thread, so that a tokenizer that hangs does not keep the process from exiting.
        threading.Thread(target=run, name=f"tokenize {content_id}", daemon=True).start()
        return outcome
