"""The processes that decode: one that dies, hangs or is left alone takes no other file with it."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from millstream.plugins.prepare import decoders as module
from millstream.plugins.prepare.decoders import Decoders
from millstream.services.errors import Code, Failure
from millstream.services.model.preparation import ImagePlan, ImageSteps, image_plan
from millstream.services.model.signature import TensorSpec

PLAN: ImagePlan = image_plan(ImageSteps(), TensorSpec(name="x", datatype="UINT8", shape=(-1, 8, 8, 3)))


def png(colour: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


#: takes a second or so
LARGE = png((1, 2, 3), (8000, 8000))


def run(test: Callable[[Decoders], Awaitable[None]]) -> None:
    async def main() -> None:
        decoders = Decoders()
        try:
            await test(decoders)
        finally:
            await decoders.close()

    asyncio.run(main())


async def colour_of(decoders: Decoders, colour: tuple[int, int, int]) -> list[int]:
    (found,) = await decoders.decode(PLAN, [png(colour)])
    pixels: list[int] = np.frombuffer(found.data, np.uint8)[:3].tolist()
    return pixels


def test_files_are_answered_in_their_order() -> None:
    async def test(decoders: Decoders) -> None:
        found = await decoders.decode(PLAN, [png((at, 0, 0)) for at in range(20)])
        assert [one.data[0] for one in found] == list(range(20))

    run(test)


def test_a_process_that_was_killed_between_files_is_replaced() -> None:
    async def test(decoders: Decoders) -> None:
        await colour_of(decoders, (1, 1, 1))
        (process,) = decoders._free
        os.kill(process._process.pid, signal.SIGKILL)
        await process._process.wait()
        assert await colour_of(decoders, (2, 2, 2)) == [2, 2, 2]

    run(test)


def test_a_process_that_dies_with_a_file_fails_that_file_alone() -> None:
    async def test(decoders: Decoders) -> None:
        await colour_of(decoders, (1, 1, 1))
        (process,) = decoders._free
        large = asyncio.ensure_future(decoders.decode(PLAN, [LARGE]))
        while decoders._free:  # it has taken the process
            await asyncio.sleep(0)
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(Failure, match="file 0 crashes its decoder") as refused:
            await large
        assert refused.value.code is Code.INVALID
        assert await colour_of(decoders, (2, 2, 2)) == [2, 2, 2]

    run(test)


def test_a_file_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(decoders: Decoders) -> None:
        await colour_of(decoders, (1, 1, 1))
        with monkeypatch.context() as limits:
            limits.setattr(module, "FILE_S_MAX", 0.001)
            with pytest.raises(Failure, match=r"takes more than 0\.001 s"):
                await decoders.decode(PLAN, [LARGE])
        assert not decoders._free
        assert await colour_of(decoders, (2, 2, 2)) == [2, 2, 2]

    run(test)


def test_the_answer_to_a_file_whose_caller_went_is_nobody_elses() -> None:
    async def test(decoders: Decoders) -> None:
        await colour_of(decoders, (1, 1, 1))
        gone = asyncio.ensure_future(decoders.decode(PLAN, [LARGE]))
        while decoders._free:
            await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert await colour_of(decoders, (2, 2, 2)) == [2, 2, 2]

    run(test)


def test_files_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 3)

    async def test(decoders: Decoders) -> None:
        with pytest.raises(Failure) as refused:
            await decoders.decode(PLAN, [png((0, 0, 0))] * 4)
        assert refused.value.code is Code.OVERLOADED
        found: list[Any] = await decoders.decode(PLAN, [png((9, 0, 0))] * 3)
        assert [one.data[0] for one in found] == [9, 9, 9]

    run(test)
