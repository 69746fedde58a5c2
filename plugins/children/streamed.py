"""The side of the process whose instance answers requests in parts, several at once (worker side: streaming_worker.py).

{"stream": n, "window": bytes} + tensors ─> a thread, or a task of the event loop ─> {"part": n} + tensors, …
                                            ─> {"end": n}, or {"end": n, "error": [kind, text]}
{"taken": n, "ordinal": parts that the caller has}, {"cancel": n} ─> the run goes on, or ends
Standard library alone: it may run in an environment that has nothing else.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from millstream.plugins.children.confined import Serving, TerminatedError, described
from millstream.plugins.children.message_channel import Channel, TensorData

#: the answers to a request: an iterator, or an asynchronous one
Answers = Iterator[Sequence[TensorData]] | AsyncIterator[Sequence[TensorData]]
#: what a part counts in the window beside its tensors (services/wire/part_messages.py)
PART_BYTES = 64
_WAIT_S = 0.01


class Streaming(Serving):
    """What runs requests, made by a `Load` in place of a `Run`.

    Args:
        answers: begins to answer the tensors of a request.
        streams: requests at once; others wait.
        loop: runs asynchronous answers; None: they are not.
    """

    def __init__(
        self,
        answers: Callable[[Sequence[TensorData]], Answers],
        streams: int,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._answers = answers
        self._streams = streams
        self._loop = loop

    def serve(self, channel: Channel) -> NoReturn:
        """Serve until the other side closes the connection (ClosedError)."""
        sending = threading.Lock()

        def send(header: dict[str, Any], tensors: Sequence[TensorData] = ()) -> None:
            with sending:
                channel.send(header, tensors)

        running: dict[int, _Run] = {}
        if self._loop is not None:
            threading.Thread(target=self._loop.run_forever, name="answers", daemon=True).start()
        free = threading.Semaphore(self._streams)
        while True:
            message = channel.receive()
            header = message.header
            if "stream" in header:
                number = int(header["stream"])
                run = running[number] = _Run(number, int(header["window"]), send, partial(running.pop, number, None))
                # The tensors are views of the message, which nothing else uses.
                self._begin(run, message.tensors, free)
            elif (run := running.get(int(header.get("taken", header.get("cancel", 0))))) is not None:  # type: ignore[assignment]
                if "taken" in header:
                    run.taken(int(header["ordinal"]))
                else:
                    run.cancel()

    def _begin(self, run: _Run, tensors: Sequence[TensorData], free: threading.Semaphore) -> None:
        if self._loop is not None:
            run.loop = self._loop
            coroutine = run.run_async(lambda: self._answers(tensors))
            self._loop.call_soon_threadsafe(lambda: run.started(asyncio.ensure_future(coroutine)))
            return

        def work() -> None:
            with free:
                run.run(lambda: self._answers(tensors))

        threading.Thread(target=work, name=f"answer {run.number}", daemon=True).start()


class _Run:
    """One request."""

    def __init__(self, number: int, window: int, send: Callable[..., None], forget: Callable[[], object]) -> None:
        self.number = number
        self._forget = forget
        self._window = window
        self._send = send
        self._changed = threading.Condition()
        self._sent: deque[int] = deque()  # bytes of the parts that the caller does not have
        self._sent_bytes = 0
        self._taken = 0
        self._cancelled = False
        self._thread = 0  # while its code runs that is not ours
        self._struck = False  # whether that thread was told to end
        self.loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._go: asyncio.Event | None = None

    def taken(self, ordinal: int) -> None:
        """Note that the caller has the parts up to `ordinal`."""
        with self._changed:
            while self._taken < ordinal and self._sent:
                self._taken += 1
                self._sent_bytes -= self._sent.popleft()
            self._changed.notify()
        self._wake()

    def cancel(self) -> None:
        """Have it end: at its next part, or by TerminatedError in its code."""
        with self._changed:
            if self._cancelled:
                return
            self._cancelled = True
            self._changed.notify()
            if self._thread:
                self._struck = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(TerminatedError)
                )
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._cancel_task)

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _wake(self) -> None:
        if self.loop is not None and self._go is not None:
            self.loop.call_soon_threadsafe(self._go.set)

    def started(self, task: asyncio.Task[None]) -> None:
        """Note the task that runs it."""
        self._task = task
        if self._cancelled:
            task.cancel()

    def run(self, begin: Callable[[], Any]) -> None:
        """Run it in this thread."""
        answers: Any = None
        try:
            answers = self._theirs(begin)
            while (part := self._theirs(lambda: next(answers, None))) is not None:
                self._send({"part": self.number}, part)
                self._count(part)
                if not self._may_go_on():
                    break
            ended: dict[str, Any] = {"end": self.number}
        except BaseException as error:
            ended = {"end": self.number, "error": described(error)}
        with suppress(BaseException):  # its end is told all the same
            if answers is not None and self._cancelled:
                answers.close()
        self._tell(ended)

    def _theirs(self, call: Callable[[], Any]) -> Any:
        """Return what code of the model returns, which `cancel` may end meanwhile."""
        with self._changed:
            if self._cancelled:
                raise TerminatedError
            self._thread = threading.get_ident()
        try:
            result = call()
        except TerminatedError:
            with self._changed:
                self._thread = 0
            raise
        except BaseException:
            self._leave()
            raise
        self._leave()
        return result

    def _leave(self) -> None:
        """Note that code of the model runs no longer. Raises TerminatedError if that is on its way to this thread."""
        with self._changed:
            self._thread = 0
            struck = self._struck
        while struck:
            time.sleep(_WAIT_S)

    def _count(self, part: Sequence[TensorData]) -> None:
        size = PART_BYTES + sum(len(memoryview(tensor.data).cast("B")) for tensor in part)
        with self._changed:
            self._sent.append(size)
            self._sent_bytes += size

    def _may_go_on(self) -> bool:
        """Wait until there is room in the window; return whether more is wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled or self._sent_bytes < self._window)
            return not self._cancelled

    async def run_async(self, begin: Callable[[], Any]) -> None:
        """Run it in the event loop."""
        self._go = asyncio.Event()
        answers: Any = None
        try:
            answers = begin()
            async for part in answers:
                self._send({"part": self.number}, part)
                self._count(part)
                while self._sent_bytes >= self._window:
                    self._go.clear()
                    await self._go.wait()
            ended: dict[str, Any] = {"end": self.number}
        except asyncio.CancelledError:
            ended = {"end": self.number, "error": described(TerminatedError())}
        except BaseException as error:
            ended = {"end": self.number, "error": described(error)}
        with suppress(BaseException):  # its end is told all the same
            if answers is not None:
                await answers.aclose()
        self._tell(ended)

    def _tell(self, ended: dict[str, Any]) -> None:
        self._forget()  # first: the other side may use the number again
        with suppress(Exception):  # the other side is gone, and this process ends
            self._send(ended)
