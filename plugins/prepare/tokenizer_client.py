"""Starts a process that tokenizes for one version, talks to it, and tries the tokenizers of uploads.

tokenizer.json ─> TokenizerProcess.start ─> encode, one call at a time ─> close
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from millstream.plugins.prepare.confined_process import MEMORY_BYTES_MAX, ConfinedProcess, ProcessEnded
from millstream.plugins.prepare.tokenizer_process import TRIAL, Encoded, Limits, Texts, pack, read_answers
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.usage import TOKENIZER
from millstream.services.process.cancellation import uninterrupted

FILE_BYTES_MAX = 64 << 20
#: start of the process, in which it reads its tokenizer.json
START_S_MAX = 30.0
#: one message of texts
RUN_S_MAX = 10.0
_TRIED_MAX = 4  # tokenizers of one upload
_MODULE = "millstream.plugins.prepare.tokenizer_process"


class TokenizerProcess(ConfinedProcess):
    """A running process. Use it in one event loop, for one call at a time."""

    @classmethod
    async def of(cls, content: bytes, what: str) -> TokenizerProcess:
        """Return a process that has read a tokenizer.json; `what`: "the tokenizer.json of model 'm'", for messages.

        Raises Failure: INVALID, for a file that cannot be read within the limits; UNSUPPORTED, the library is not
        installed; UNAVAILABLE, no process can be started.
        """
        if find_spec("tokenizers") is None:
            raise Failure(
                Code.UNSUPPORTED,
                "this server takes no text: pip install 'millstream[embeddings]', or send token ids",
            )
        started = await cls.start(_MODULE)
        try:
            (loaded,) = await started._answers(content, 1, START_S_MAX)
        except BaseException as error:
            await uninterrupted(started.close())
            if isinstance(error, ProcessEnded):
                raise invalid(f"{what} cannot be read within {_limits(START_S_MAX)}") from None
            raise
        if loaded.error:
            await uninterrupted(started.close())
            raise invalid(f"{what} cannot be read: {loaded.error}")
        return started

    async def encode(self, lists: Sequence[list[str | tuple[str, str]]], limits: Limits) -> list[Encoded]:
        """Return the answer to each list of texts. Raises ProcessEnded: `close` it then."""
        return await self._answers(pack(Texts(list(lists), limits)), len(lists), RUN_S_MAX)

    async def try_out(self) -> str:
        """Tokenize short texts; return what is wrong, ""; nothing. Raises ProcessEnded."""
        (answer,) = await self._answers(TRIAL, 1, RUN_S_MAX)
        return answer.error

    async def _answers(self, message: bytes, answers: int, seconds_max: float) -> list[Encoded]:
        answer = await self.ask(message, seconds_max)
        try:
            return read_answers(answer, answers)
        except ValueError:  # what is no answer
            raise ProcessEnded(slow=False) from None


def _limits(seconds: float) -> str:
    return f"{MEMORY_BYTES_MAX >> 20} MiB of memory and {seconds:g} s"


async def try_tokenizers(source: Path) -> None:
    """Try the tokenizers of an upload, whose files are below `source`. Raises Failure(INVALID), as `_try_tokenizer`."""
    for path in await asyncio.to_thread(_tokenizers, source):
        await _try_tokenizer(path)


def _tokenizers(source: Path) -> list[Path]:
    found = (path for path in sorted(source.rglob(TOKENIZER)) if path.is_file() and not path.is_symlink())
    return list(islice(found, _TRIED_MAX))


async def _try_tokenizer(path: Path) -> None:
    """Try the tokenizer.json of an upload. Raises Failure(INVALID) if short texts explode, crash it or never end.

    A file that the library cannot read is not refused: the model may be used with token ids.
    """
    if find_spec("tokenizers") is None or path.stat().st_size > FILE_BYTES_MAX:
        return
    content = await asyncio.to_thread(path.read_bytes)
    try:
        process = await TokenizerProcess.of(content, f"the {TOKENIZER}")
    except Failure as failure:
        if failure.code is Code.INVALID and "cannot be read:" in failure.message:
            return
        raise
    try:
        wrong = await process.try_out()
    except ProcessEnded as ended:
        cause = "takes longer than" if ended.slow else "needs more than"
        what = f"{RUN_S_MAX:g} s" if ended.slow else f"{MEMORY_BYTES_MAX >> 20} MiB of memory"
        wrong = f"the {TOKENIZER} {cause} {what} for texts of a few letters"
    finally:
        await uninterrupted(process.close())
    if wrong:
        raise invalid(wrong)
