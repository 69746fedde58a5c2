"""tokenizer_thread: runs a version's tokenizer in a thread of its own, and for a bounded time.

A tokenizer.json comes with an upload: its regular expressions may not terminate on some text. A thread cannot be
killed, so each version has its own: one that hangs blocks its version's texts, but no other version and no shared
thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
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
#: Requests that may wait for the turn of one version; beyond it, they are OVERLOADED.
WAITING_MAX = 1024


class TokenizerThread:
    """Runs one tokenizer at a time for each version, in the order of the requests. Use it in one event loop.

    Args:
        seconds_max: how long the texts of one request may take, waiting for the version's thread included.
    """

    def __init__(self, seconds_max: float = SECONDS_MAX) -> None:
        self._seconds_max = seconds_max
        #: content id of a version whose thread runs -> the requests that wait for it
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(self, content_id: str, work: Callable[[], T]) -> T:
        """Return what `work` returns.

        Raises what it raises, and Failure: EXPIRED, too slow; UNAVAILABLE, too many versions; OVERLOADED, too many
        requests.
        """
        try:
            async with asyncio.timeout(self._seconds_max):
                await self._turn(content_id)
                return await self._start(content_id, work)
        except TimeoutError:
            raise Failure(
                Code.EXPIRED,
                f"the texts took longer than {self._seconds_max:g} s to tokenize: send shorter ones, or tokens",
            ) from None

    async def _turn(self, content_id: str) -> None:
        """Wait until no other request runs the version's tokenizer. `_pass_on` ends the turn."""
        waiting = self._waiting.get(content_id)
        if waiting is None:
            if len(self._waiting) >= VERSIONS_MAX:
                raise Failure(Code.UNAVAILABLE, "too many texts are being tokenized: try again", retry_after_s=1)
            self._waiting[content_id] = deque()
            return
        if len(waiting) >= WAITING_MAX:
            raise Failure(
                Code.OVERLOADED, f"{WAITING_MAX} requests wait for their texts to be tokenized", retry_after_s=1
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with suppress(ValueError):
                    waiting.remove(turn)
            else:  # the turn came together with the cancellation
                self._pass_on(content_id)
            raise

    def _pass_on(self, content_id: str) -> None:
        waiting = self._waiting[content_id]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[content_id]

    def _start(self, content_id: str, work: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()

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
            self._pass_on(content_id)
            if not outcome.done():  # done: the request timed out or was cancelled
                tell()

        # A daemon thread, so that a tokenizer that hangs does not keep the process from exiting.
        try:
            threading.Thread(target=run, name=f"tokenize {content_id}", daemon=True).start()
        except RuntimeError:  # the system has no thread left
            self._pass_on(content_id)
            raise
        return outcome
