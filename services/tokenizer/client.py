"""Starts a process that tokenizes for one version, talks to it, and ends it when it takes too long.

tokenizer.json ─> TokenizerProcess.start ─> encode, one call at a time ─> close
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from millstream.services.errors import Code, Failure, invalid
from millstream.services.process.cancellation import cancel_all, uninterrupted
from millstream.services.sandbox.child import IMPORT_ROOT, confined_environment
from millstream.services.sandbox.group_watch import FolderWatch, GroupWatch
from millstream.services.tokenizer.process import (
    LENGTH,
    MEMORY_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    TRIAL,
    Encoded,
    Limits,
    Texts,
    pack,
    read_answers,
)

TOKENIZER = "tokenizer.json"
FILE_BYTES_MAX = 64 << 20
#: start of the process, in which it reads its tokenizer.json
START_S_MAX = 30.0
#: one message of texts
RUN_S_MAX = 10.0
_MODULE = "millstream.services.tokenizer.process"


class TokenizerEnded(Exception):
    """The process ended, or was ended, while it had texts. `slow`: since it took too long."""

    def __init__(self, *, slow: bool) -> None:
        super().__init__("too slow" if slow else "ended")
        self.slow = slow


class TokenizerProcess:
    """A running process. Use it in one event loop, for one call at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        folder = FolderWatch(None, 0, included="")
        self._watch = GroupWatch(process.pid, folder, MEMORY_BYTES_MAX, alone=True)

    @classmethod
    async def start(cls, content: bytes, what: str) -> TokenizerProcess:
        """Return a process that has read a tokenizer.json; `what`: "the tokenizer.json of model 'm'", for messages.

        Raises Failure: INVALID, for a file that cannot be read within the limits; UNSUPPORTED, the library is not
        installed; UNAVAILABLE, no process can be started.
        """
        if find_spec("tokenizers") is None:
            raise Failure(
                Code.UNSUPPORTED,
                "this server takes no text: pip install 'millstream[embeddings]', or send token ids",
            )
        starting = asyncio.ensure_future(_start())
        try:
            started = cls(await asyncio.shield(starting))
        except OSError as error:
            message = f"the tokenizer cannot be started: {error.strerror}"
            raise Failure(Code.UNAVAILABLE, message, retry_after_s=1) from error
        except asyncio.CancelledError:
            await uninterrupted(_end(starting))
            raise
        try:
            (loaded,) = await started._ask(content, 1, START_S_MAX)
        except BaseException as error:
            await uninterrupted(started.close())
            if isinstance(error, TokenizerEnded):
                raise invalid(f"{what} cannot be read within {_limits(START_S_MAX)}") from None
            raise
        if loaded.error:
            await uninterrupted(started.close())
            raise invalid(f"{what} cannot be read: {loaded.error}")
        return started

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    async def encode(self, lists: Sequence[list[str]], limits: Limits) -> list[Encoded]:
        """Return the answer to each list of texts. Raises TokenizerEnded: `close` it then."""
        return await self._ask(pack(Texts(list(lists), limits)), len(lists), RUN_S_MAX)

    async def try_out(self) -> str:
        """Tokenize short texts; return what is wrong, ""; nothing. Raises TokenizerEnded."""
        (answer,) = await self._ask(TRIAL, 1, RUN_S_MAX)
        return answer.error

    async def _ask(self, message: bytes, answers: int, seconds_max: float) -> list[Encoded]:
        source, target = self._process.stdout, self._process.stdin
        assert source
        assert target
        try:
            async with asyncio.timeout(seconds_max), _watched(self._watch, self._kill):
                target.write(LENGTH.pack(len(message)) + message)
                await target.drain()
                (size_bytes,) = LENGTH.unpack(await source.readexactly(LENGTH.size))
                if size_bytes > MESSAGE_BYTES_MAX:
                    raise TokenizerEnded(slow=False)
                found = read_answers(await source.readexactly(size_bytes), answers)
        except TimeoutError:
            raise TokenizerEnded(slow=True) from None
        except (OSError, EOFError, ValueError, RuntimeError):  # what is no answer; a pipe that uvloop has closed
            raise TokenizerEnded(slow=False) from None
        exceeded = await asyncio.to_thread(self._watch.measure) if self._watch.due else ""
        if exceeded:
            raise TokenizerEnded(slow=False)
        return found

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

    following = asyncio.create_task(follow(), name="watch of a tokenizer")
    try:
        yield
    finally:
        await cancel_all([following])


async def _drop(stream: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await stream.read(1 << 16):
            pass


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        _MODULE,
        str(os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=IMPORT_ROOT,
        env=confined_environment(),
        start_new_session=True,
        limit=1 << 20,
    )


async def _end(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    with suppress(OSError):
        await TokenizerProcess(await starting).close()


def _limits(seconds: float) -> str:
    return f"{MEMORY_BYTES_MAX >> 20} MiB of memory and {seconds:g} s"


async def try_tokenizer(path: Path) -> None:
    """Try the tokenizer.json of an upload. Raises Failure(INVALID) if short texts explode, crash it or never end.

    A file that the library cannot read is not refused: the model may be used with token ids.
    """
    if find_spec("tokenizers") is None or path.stat().st_size > FILE_BYTES_MAX:
        return
    content = await asyncio.to_thread(path.read_bytes)
    try:
        process = await TokenizerProcess.start(content, f"the {TOKENIZER}")
    except Failure as failure:
        if failure.code is Code.INVALID and "cannot be read:" in failure.message:
            return
        raise
    try:
        wrong = await process.try_out()
    except TokenizerEnded as ended:
        cause = "takes longer than" if ended.slow else "needs more than"
        what = f"{RUN_S_MAX:g} s" if ended.slow else f"{MEMORY_BYTES_MAX >> 20} MiB of memory"
        wrong = f"the {TOKENIZER} {cause} {what} for texts of a few letters"
    finally:
        await uninterrupted(process.close())
    if wrong:
        raise invalid(wrong)
