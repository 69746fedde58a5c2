"""A tokenizer that does not end keeps its own version's turn, and nothing else."""

from __future__ import annotations

import asyncio
import threading

import pytest

from millstream.gateway.texts.tokenizer_thread import VERSIONS_MAX, WAITING_MAX, TokenizerThread
from millstream.services.errors import Code, Failure


def test_one_that_does_not_end_is_refused_and_others_go_on() -> None:
    release = threading.Event()

    async def use() -> None:
        tokenizing = TokenizerThread(seconds_max=0.2)
        for _ in range(3):
            with pytest.raises(Failure) as refused:
                await tokenizing.run("endless", release.wait)
            assert refused.value.code is Code.EXPIRED
        assert await tokenizing.run("good", lambda: [[1, 2]]) == [[1, 2]]
        assert await asyncio.to_thread(lambda: "the event loop's threads are free") != ""
        release.set()
        patient = TokenizerThread(seconds_max=60)
        patient._waiting = tokenizing._waiting
        assert await patient.run("endless", lambda: "its turn comes when it has ended") is not None

    asyncio.run(use())


def test_runs_of_a_version_take_turns_and_errors_are_its_callers() -> None:
    async def use() -> None:
        tokenizing = TokenizerThread()
        running = 0
        most = 0
        lock = threading.Lock()

        def work(number: int) -> int:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            with lock:
                running -= 1
            if number == 3:
                raise ValueError("three")
            return number

        async def one(number: int) -> int | str:
            try:
                return await tokenizing.run("m", lambda: work(number))
            except ValueError as error:
                return str(error)

        assert await asyncio.gather(*map(one, range(6))) == [0, 1, 2, "three", 4, 5]
        assert most == 1
        assert tokenizing._waiting == {}

    asyncio.run(use())


def test_versions_at_once_are_bounded() -> None:
    release = threading.Event()

    async def use() -> None:
        tokenizing = TokenizerThread(seconds_max=30)
        waiting = [asyncio.ensure_future(tokenizing.run(str(n), release.wait)) for n in range(VERSIONS_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(Failure) as refused:
            await tokenizing.run("one more", lambda: None)
        assert refused.value.code is Code.UNAVAILABLE
        release.set()
        await asyncio.gather(*waiting)

    asyncio.run(use())


def test_a_request_that_gives_up_while_it_waits_passes_its_turn_on() -> None:
    release = threading.Event()

    async def use() -> None:
        tokenizing = TokenizerThread(seconds_max=30)
        requests = [asyncio.ensure_future(tokenizing.run("m", release.wait)) for _ in range(4)]
        await asyncio.sleep(0)
        requests[1].cancel()  # before its turn comes
        await asyncio.sleep(0)
        (turn, _) = tokenizing._waiting["m"]
        release.set()
        while not turn.done():
            await asyncio.sleep(0)
        requests[2].cancel()  # it has the turn, and has not run on
        assert await requests[0]
        assert await requests[3]
        assert [request.cancelled() for request in requests] == [False, True, True, False]
        assert tokenizing._waiting == {}

    asyncio.run(use())


def test_requests_that_wait_for_a_version_are_bounded() -> None:
    release = threading.Event()

    async def use() -> None:
        tokenizing = TokenizerThread(seconds_max=30)
        waiting = [asyncio.ensure_future(tokenizing.run("m", release.wait)) for _ in range(WAITING_MAX + 1)]
        await asyncio.sleep(0)
        with pytest.raises(Failure) as refused:
            await tokenizing.run("m", lambda: None)
        assert refused.value.code is Code.OVERLOADED
        for request in waiting[1:]:
            request.cancel()
        release.set()
        await waiting[0]
        assert await tokenizing.run("m", lambda: "free") == "free"

    asyncio.run(use())
