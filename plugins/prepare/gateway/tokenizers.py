"""Turns texts into token ids, in a confined process for each of the versions that were used last.

texts ─> the version's queue ─> messages of several requests ─> TokenizerProcess ─> ids of each text
A tokenizer.json comes with an upload: one that hangs, crashes or explodes ends its own process, and the request that it
did so for gets the error. Requests that were in one message with it are asked again, each alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import PurePosixPath

from millstream.gateway.access.principal import caller_name
from millstream.gateway.parts import PreparerParts
from millstream.gateway.tensors.input_plans import InputPlans, Inputs
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.json_document import excerpt
from millstream.plugins.prepare.confined_process import MEMORY_BYTES_MAX, ProcessEnded
from millstream.plugins.prepare.gateway.text_plans import (
    ID_BYTES,
    TOKENS_MAX,
    TOKENS_TOTAL_MAX,
    TextPlans,
    check_bytes,
    check_tokens,
    padded_max_of,
    strings_of,
    token_inputs,
)
from millstream.plugins.prepare.tokenizer_client import FILE_BYTES_MAX, RUN_S_MAX, TokenizerProcess
from millstream.plugins.prepare.tokenizer_process import Encoded, Limits, split_ids, split_types
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.manifest import Manifest
from millstream.services.model.usage import TEXT, TOKENIZER, takes_texts
from millstream.services.model.version_files import read_inside
from millstream.services.process.cancellation import uninterrupted
from millstream.services.process.threads import run_in_thread_if_large
from millstream.services.repository.folder import FolderRepository

log = logging.getLogger("millstream.texts")

#: How long the texts of one request may take, waiting for the version's process included; beyond it, EXPIRED.
SECONDS_MAX = 20.0
#: Processes at once. The one that was used least recently ends for another version; UNAVAILABLE if all are busy.
PROCESSES_MAX = 8
#: The same with one for each caller that keeps no other busy: tokenizers of one that hang do not refuse texts of all.
PROCESSES_OF_CALLERS_MAX = 16
#: A tokenizer whose process ended this often, with no answer in between, gets no texts for a while; UNAVAILABLE then.
ENDS_MAX = 3
PAUSE_S = 10.0
#: Requests that may wait for the process of one version; beyond it, they are OVERLOADED.
WAITING_MAX = 1024
#: requests, and characters of their texts, that go to the process together
_MESSAGE_REQUESTS_MAX = 64
_MESSAGE_CHARACTERS_MAX = 256 << 10
_LIMITS = Limits(TOKENS_MAX, TOKENS_TOTAL_MAX)


class _Request:
    """Texts that wait for their ids. `alone`: they are asked for in a message of their own."""

    def __init__(self, texts: Sequence[str | tuple[str, str]]) -> None:
        self.texts = list(texts)
        self.characters = sum(len("".join(text)) for text in texts)
        self.alone = False
        self.done: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()


class _Version:
    """The queue and the process of one version."""

    def __init__(self) -> None:
        self.waiting: deque[_Request] = deque()
        self.process: TokenizerProcess | None = None
        self.serving: asyncio.Task[None] | None = None
        self.caller = ""  # name of the key whose request it began to serve
        self.ends = 0  # of the process, since the last answer
        self.paused_until = float("-inf")

    def fail(self, requests: Iterable[_Request], failure: Failure) -> None:
        """Answer these requests, and all that wait, with a failure."""
        for request in (*requests, *self.waiting):
            if not request.done.done():
                request.done.set_exception(failure)
        self.waiting.clear()

    async def close(self) -> None:
        if self.serving is not None:
            self.serving.cancel()
            with suppress(asyncio.CancelledError):
                await self.serving
        await self.end()

    async def end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            await uninterrupted(process.close())


class Tokenizers:
    """Tokenizes the texts of a gateway. Use it in one event loop, and close it.

    `seconds_max`: how long the texts of one request may take.
    """

    def __init__(self, repository: FolderRepository, seconds_max: float = SECONDS_MAX) -> None:
        self._repository = repository
        self._seconds_max = seconds_max
        #: by content id; those used last are at the end
        self._versions: OrderedDict[str, _Version] = OrderedDict()

    async def encode(self, manifest: Manifest, texts: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Return the number of tokens of each text, and its ids; no ids if there are more than the limits on tokens.

        Raises Failure: those of `_encoded`.
        """
        answer = await self._encoded(manifest, texts)
        return _split(manifest, answer, len(texts))

    async def _encoded(self, manifest: Manifest, texts: Sequence[str | tuple[str, str]]) -> Encoded:
        """Return the tokenizer's answer to texts, or to pairs of texts.

        Raises Failure: INVALID, the version has no tokenizer or a broken one, or it fails on these texts; UNSUPPORTED,
        the library is not installed; EXPIRED, too slow; UNAVAILABLE, too many versions; OVERLOADED, too many requests.
        """
        version = await self._of(manifest)
        left_s = version.paused_until - asyncio.get_running_loop().time()
        if left_s > 0:
            message = f"the tokenizer of model '{manifest.model}' crashed or hung {ENDS_MAX} times: try again later"
            raise Failure(Code.UNAVAILABLE, message, retry_after_s=left_s)
        if len(version.waiting) >= WAITING_MAX:
            raise Failure(
                Code.OVERLOADED, f"{WAITING_MAX} requests wait for their texts to be tokenized", retry_after_s=1
            )
        request = _Request(texts)
        version.waiting.append(request)
        if version.serving is None:
            version.caller = caller_name()
            version.serving = asyncio.create_task(self._serve(version, manifest))
        try:
            async with asyncio.timeout(self._seconds_max):
                answer = await request.done
        except TimeoutError:
            raise _too_slow(self._seconds_max) from None
        if answer.error:
            raise invalid(answer.error)
        return answer

    async def ids(self, manifest: Manifest, texts: Sequence[str], name: str) -> list[list[int]]:
        """Return the token ids of each of the texts, at least one; `name`: of the member that has them, for messages.

        Raises Failure: INVALID for texts over a limit or without a token; those of `encode`.
        """
        check_bytes(name, texts)
        counts, entries = await self.encode(manifest, texts)
        check_tokens(name, counts)
        return entries

    async def pair_inputs(
        self, manifest: Manifest, plans: InputPlans, pairs: Sequence[tuple[str, str]], name: str
    ) -> tuple[Inputs, int]:
        """Return the inputs of a request with pairs of texts, at least one, and the tokens of all.

        `plans`: the version's own, which take tokens; `name`: of the member that has the texts, for messages. Raises
        Failure as `ids`.
        """
        check_bytes(name, ["".join(pair) for pair in pairs])
        answer = await self._encoded(manifest, pairs)
        counts, entries = _split(manifest, answer, len(pairs))
        check_tokens(name, counts)
        try:
            types = split_types(answer, counts)
        except ValueError:
            raise invalid(_failed(manifest)) from None
        size_bytes = ID_BYTES * len(entries) * max(counts)
        padded_max = padded_max_of(manifest)
        inputs, _ = await run_in_thread_if_large(size_bytes, token_inputs, plans, entries, padded_max, types)
        return inputs, sum(counts)

    async def inputs(self, manifest: Manifest, plans: InputPlans, texts: InputTensor) -> Inputs:
        """Return the inputs of a request with texts: BYTES, (texts,), checked by the plans of texts.

        `plans`: the version's own, which take tokens. Raises Failure as `ids`.
        """
        strings = await run_in_thread_if_large(texts.size_bytes, strings_of, texts)
        counts, entries = await self.encode(manifest, strings)
        check_tokens(TEXT, counts)
        size_bytes = ID_BYTES * len(entries) * max(map(len, entries))
        return (await run_in_thread_if_large(size_bytes, token_inputs, plans, entries, padded_max_of(manifest)))[0]

    def plans(self, manifest: Manifest, own: InputPlans) -> TextPlans | None:
        """Return the plans of requests with texts; None if the version takes no texts. `own`: its own plans."""
        return TextPlans(manifest, own, self) if takes_texts(manifest) else None

    async def stop(self) -> None:
        """End all processes."""
        while self._versions:
            await self._versions.popitem()[1].close()

    async def _of(self, manifest: Manifest) -> _Version:
        version = self._versions.get(manifest.content_id)
        if version is None:
            while len(self._versions) >= PROCESSES_MAX:
                idle = next((name for name, one in self._versions.items() if one.serving is None), None)
                if idle is None:
                    self._check_share()
                    break
                await self._versions.pop(idle).close()
            version = self._versions.setdefault(manifest.content_id, _Version())
        self._versions.move_to_end(manifest.content_id)
        return version

    def _check_share(self) -> None:
        """Raise Failure(UNAVAILABLE) unless the caller may have a process though PROCESSES_MAX are busy."""
        callers = {version.caller for version in self._versions.values()}
        if caller_name() in callers or len(self._versions) >= PROCESSES_OF_CALLERS_MAX:
            raise Failure(Code.UNAVAILABLE, "too many texts are being tokenized: try again", retry_after_s=1)

    async def _serve(self, version: _Version, manifest: Manifest) -> None:
        """Answer what waits for a version, until nothing does."""
        message: list[_Request] = []
        try:
            while message := _next_message(version.waiting):
                await self._answer(version, manifest, message)
        except Failure as failure:  # of the start: all that wait need it
            version.fail(message, failure)
        except asyncio.CancelledError:
            version.fail(message, Failure(Code.UNAVAILABLE, "the gateway is shutting down", retry_after_s=1))
            raise
        except Exception:
            log.exception("the tokenizer of model %r failed", manifest.model)
            version.fail(message, Failure(Code.INTERNAL, "the tokenizer failed"))
        finally:
            version.serving = None

    async def _answer(self, version: _Version, manifest: Manifest, message: list[_Request]) -> None:
        if version.process is not None and not version.process.alive:  # it was killed while it had nothing to do
            await version.end()
        if version.process is None:
            what = f"the {TOKENIZER} of model '{manifest.model}'"
            version.process = await TokenizerProcess.of(await asyncio.to_thread(self._content, manifest), what)
        try:
            answers = await version.process.encode([request.texts for request in message], _LIMITS)
        except ProcessEnded as ended:
            log.warning("the tokenizer of model %r was ended: %s", manifest.model, ended)
            await version.end()
            version.ends += 1
            if version.ends >= ENDS_MAX:
                version.ends, version.paused_until = 0, asyncio.get_running_loop().time() + PAUSE_S
            if len(message) > 1:  # one of them did it
                for request in reversed(message):
                    request.alone = True
                    version.waiting.appendleft(request)
                return
            if not message[0].done.done():
                message[0].done.set_exception(_too_slow(RUN_S_MAX) if ended.slow else invalid(_failed(manifest)))
            return
        version.ends = 0
        for request, answer in zip(message, answers, strict=True):
            if not request.done.done():
                request.done.set_result(answer)

    def _content(self, manifest: Manifest) -> bytes:
        """Read the file: beside the model, in the uploaded archive, or in the version's folder. Raises Failure."""
        folder = self._repository.local_path(manifest.model, manifest.version)
        for place in (PurePosixPath(manifest.served).parent, PurePosixPath("source"), PurePosixPath()):
            path = str(place / TOKENIZER)
            if os.path.lexists(folder / path):
                return read_inside(folder, path, FILE_BYTES_MAX, f"the tokenizer of model '{manifest.model}':")
        raise invalid(
            f"model '{excerpt(manifest.model)}' has no tokenizer: send token ids, or upload the model in a zip or tar "
            f"with its {TOKENIZER}"
        )


def build(parts: PreparerParts) -> Tokenizers:
    """Return the preparer of texts."""
    return Tokenizers(parts.repository)


def _next_message(waiting: deque[_Request]) -> list[_Request]:
    """Take the requests of the next message, those left out whose callers are gone; none: nothing waits."""
    message: list[_Request] = []
    characters = 0
    while waiting and len(message) < _MESSAGE_REQUESTS_MAX:
        request = waiting[0]
        if request.done.done():
            waiting.popleft()
            continue
        characters += request.characters
        if message and (request.alone or characters > _MESSAGE_CHARACTERS_MAX):
            break
        message.append(waiting.popleft())
        if request.alone:
            break
    return message


def _split(manifest: Manifest, answer: Encoded, texts: int) -> tuple[list[int], list[list[int]]]:
    """Return the number of tokens of each text, and its ids. Raises Failure(INVALID)."""
    try:
        return split_ids(answer, texts, TOKENS_TOTAL_MAX)
    except ValueError:
        raise invalid(_failed(manifest)) from None


def _too_slow(seconds: float) -> Failure:
    return Failure(Code.EXPIRED, f"the texts took longer than {seconds:g} s to tokenize: send shorter ones, or tokens")


def _failed(manifest: Manifest) -> str:
    return (
        f"the tokenizer of model '{manifest.model}' crashed on the texts, or needs more than {MEMORY_BYTES_MAX >> 20} "
        "MiB of memory for them: send other ones, or tokens"
    )
