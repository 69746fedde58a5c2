"""Starts a confined process that answers messages, talks to it, and ends it when it takes too long or too much.

ConfinedProcess.start(module) ─> ask, one call at a time ─> close
Each message has its length before it. What comes back is untrusted: a file may have taken the process over.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import IO, Self

from millstream.services.errors import Code, Failure
from millstream.services.process.cancellation import cancel_all, uninterrupted
from millstream.services.sandbox.child import IMPORT_ROOT, confined_environment
from millstream.services.sandbox.confine import Limits, begin, confine
from millstream.services.sandbox.group_watch import FolderWatch, GroupWatch

#: address space of a process: what a tokenizer.json of 64 MiB takes with 4 MiB of text, or a large image twice
MEMORY_BYTES_MAX = 2 << 30
#: bytes of one message, in both directions
MESSAGE_BYTES_MAX = 288 << 20
_LENGTH = struct.Struct("<I")
_CPU_S_MAX = 1 << 30  # the gateway ends a process that takes long


class ProcessEnded(Exception):
    """The process ended, or was ended, while it had a message. `slow`: since it took too long."""

    def __init__(self, *, slow: bool) -> None:
        super().__init__("too slow" if slow else "ended")
        self.slow = slow


class ConfinedProcess:
    """A running process. Use it in one event loop, for one call at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        folder = FolderWatch(None, 0, included="")
        self._watch = GroupWatch(process.pid, folder, MEMORY_BYTES_MAX, alone=True)

    @classmethod
    async def start(cls, module: str) -> Self:
        """Return a process that runs `module`. Raises Failure(UNAVAILABLE): no process can be started."""
        starting = asyncio.ensure_future(_start(module))
        try:
            return cls(await asyncio.shield(starting))
        except OSError as error:
            message = f"a process for the request cannot be started: {error.strerror}"
            raise Failure(Code.UNAVAILABLE, message, retry_after_s=1) from error
        except asyncio.CancelledError:
            await uninterrupted(cls._end(starting))
            raise

    @classmethod
    async def _end(cls, starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
        with suppress(OSError):
            await cls(await starting).close()

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    async def ask(self, message: bytes, seconds_max: float) -> bytes:
        """Return the answer to a message. Raises ProcessEnded: `close` it then."""
        source, target = self._process.stdout, self._process.stdin
        assert source
        assert target
        try:
            async with asyncio.timeout(seconds_max), _watched(self._watch, self._kill):
                target.write(_LENGTH.pack(len(message)))
                target.write(message)
                await target.drain()
                (size_bytes,) = _LENGTH.unpack(await source.readexactly(_LENGTH.size))
                if size_bytes > MESSAGE_BYTES_MAX:
                    raise ProcessEnded(slow=False)
                answer = await source.readexactly(size_bytes)
        except TimeoutError:
            raise ProcessEnded(slow=True) from None
        except (OSError, EOFError, RuntimeError):  # RuntimeError: a pipe that uvloop has closed
            raise ProcessEnded(slow=False) from None
        exceeded = await asyncio.to_thread(self._watch.measure) if self._watch.due else ""
        if exceeded:
            raise ProcessEnded(slow=False)
        return answer

    def _kill(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End the process."""
        self._kill()
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        # The rest of its output is read: asyncio says that a process ended once its pipes have.
        await asyncio.gather(_drop(self._process.stdout), self._process.wait())


@asynccontextmanager
async def _watched(watch: GroupWatch, kill: Callable[[], None]) -> AsyncIterator[None]:
    """Call `kill` when the limits of `watch` are exceeded within the block."""

    async def follow() -> None:
        await watch.until_exceeded()
        kill()

    following = asyncio.create_task(follow(), name="watch of a confined process")
    try:
        yield
    finally:
        await cancel_all([following])


async def _drop(stream: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await stream.read(1 << 16):
            pass


async def _start(module: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        str(os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=IMPORT_ROOT,
        env=confined_environment(),
        start_new_session=True,
        limit=1 << 20,
    )


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Confine this process, and answer the messages of its parent until its input ends. Its argument is the parent."""
    begin(int(sys.argv[1]))
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no message
    confine((), (), limits=Limits(MEMORY_BYTES_MAX, _CPU_S_MAX, 0))
    while (message := _read(source)) is not None:
        content = answer(message)
        answers.write(_LENGTH.pack(len(content)))
        answers.write(content)
        answers.flush()


def _read(source: IO[bytes]) -> bytes | None:
    head = source.read(_LENGTH.size)
    return source.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else None
