"""Decodes files of callers in confined processes, as many as there are processors.

files ─> wait for a process, in order ─> decoder_process ─> tensors
A file that crashes its process, hangs or explodes ends that process alone, and gets the error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from millstream.plugins.prepare.confined_process import MEMORY_BYTES_MAX, ConfinedProcess, ProcessEnded
from millstream.plugins.prepare.decoder_process import ERROR_CHARACTERS_MAX, Decoded, EncodedFile, pack
from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.report import one_line
from millstream.services.model.preparation import AudioPlan, ImagePlan
from millstream.services.process.cancellation import uninterrupted
from millstream.services.process.machine_share import cpus

log = logging.getLogger("millstream.prepare")

#: How long the files of one request may take, waiting for a process included; beyond it, EXPIRED.
SECONDS_MAX = 20.0
#: One file. The largest image that is allowed takes about a second.
FILE_S_MAX = 10.0
#: Files that may wait for a process in one gateway; beyond it, requests are OVERLOADED.
WAITING_MAX = 1024
_MODULE = "millstream.plugins.prepare.decoder_process"
_decoded = msgspec.msgpack.Decoder(Decoded)


class Decoders:
    """The processes of a gateway that decode. Use it in one event loop, and close it."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(cpus())
        self._free: list[ConfinedProcess] = []
        self._waiting = 0

    async def decode(self, plan: ImagePlan | AudioPlan, files: Sequence[bytes]) -> list[Decoded]:
        """Return the tensor of each file. Raises Failure.

        INVALID, a file that cannot be decoded; EXPIRED, too slow; OVERLOADED, too many wait; UNAVAILABLE.
        """
        if self._waiting + len(files) > WAITING_MAX:
            raise Failure(Code.OVERLOADED, f"{self._waiting} files wait to be decoded: try again", retry_after_s=1)
        self._waiting += len(files)
        try:
            async with asyncio.timeout(SECONDS_MAX):
                found = await asyncio.gather(
                    *(self._one(plan, at, file) for at, file in enumerate(files)), return_exceptions=True
                )
        except TimeoutError:
            raise Failure(Code.EXPIRED, f"the files took longer than {SECONDS_MAX:g} s to decode") from None
        finally:
            self._waiting -= len(files)
        decoded = [one for one in found if not isinstance(one, BaseException)]
        if len(decoded) < len(found):
            raise next(one for one in found if isinstance(one, BaseException))
        return decoded

    async def close(self) -> None:
        """End all processes."""
        while self._free:
            await self._free.pop().close()

    async def _one(self, plan: ImagePlan | AudioPlan, at: int, file: bytes) -> Decoded:
        async with self._turns:  # a caller that goes away leaves a process that may be used again
            answer = await uninterrupted(self._answer(plan, at, file))
        if answer.error:
            raise invalid(f"file {at}: {one_line(answer.error[:ERROR_CHARACTERS_MAX])}")
        return answer

    async def _answer(self, plan: ImagePlan | AudioPlan, at: int, file: bytes) -> Decoded:
        process = await self._process()
        image, audio = (plan, None) if isinstance(plan, ImagePlan) else (None, plan)
        try:
            answer = _decoded.decode(await process.ask(pack(EncodedFile(file, image, audio)), FILE_S_MAX))
        except (ProcessEnded, msgspec.MsgspecError) as error:
            log.warning("a decoder was ended by a file of %d bytes: %s", len(file), error)
            await process.close()
            raise invalid(f"file {at} crashes its decoder, or takes more than {_limits()}: send another") from None
        except BaseException:  # its answer would be taken for that of the next file
            await process.close()
            raise
        self._free.append(process)
        return answer

    async def _process(self) -> ConfinedProcess:
        while self._free:
            process = self._free.pop()
            if process.alive:
                return process
            await process.close()
        return await ConfinedProcess.start(_MODULE)


def _limits() -> str:
    return f"{FILE_S_MAX:g} s or {MEMORY_BYTES_MAX >> 20} MiB of memory"
