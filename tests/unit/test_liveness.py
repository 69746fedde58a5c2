"""Which children are killed for showing no sign of life, over real processes and a clock of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from millstream.services.process.sign_of_life import SignOfLife
from millstream.services.supervisor.child import Child
from millstream.services.supervisor.liveness import FIRST_SIGN_S_MAX, LOOK_S, SILENT_S_MAX, Liveness
from millstream.services.supervisor.plan import Program
from tests.kit.stack import _sleeps
from tests.kit.wait import wait_until

#: shows one sign of life, and no other
STAYS = "import os, sys, time; os.write(int(sys.argv[2]), b'.'); time.sleep(600)"
PATIENCE_S = 30.0


class Watched:
    """A child of one program, and the Liveness that watches it."""

    def __init__(self, folder: Path, code: str) -> None:
        self.said: list[str] = []
        self.hung: list[bool] = []
        self.ended = asyncio.Event()
        program = Program("one", (sys.executable, "-c", code), shows_life=True)
        self.child = Child(program, folder, self.said.append, self._on_death, on_trial=True)
        self.liveness = Liveness(lambda: [self.child])
        self.now = 0.0
        self.liveness._looked_at = self.now

    async def _on_death(self, child: Child, pid: int) -> bool:
        self.hung.append(child.hung)
        self.ended.set()
        return False

    def look(self, seconds: float, every_s: float = LOOK_S) -> None:
        """Look again and again for some seconds."""
        for _ in range(round(seconds / every_s)):
            self.now += every_s
            self.liveness.look(self.now)


@asynccontextmanager
async def watched(folder: Path, code: str, signs: int = 1) -> AsyncIterator[Watched]:
    one = Watched(folder, code)
    one.child.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not one.child.pid or one.child.signs < signs:
                await asyncio.sleep(0.01)
            yield one
    finally:
        one.child.kill()
        await one.child.ended()


def test_a_silent_child_is_killed_and_what_it_ran_is_told(tmp_path: Path) -> None:
    async def work() -> None:
        async with watched(tmp_path, STAYS) as one:
            one.look(SILENT_S_MAX)
            assert not one.said
            one.look(2 * LOOK_S)
            await one.ended.wait()
        [said] = one.said
        silent = f"one has shown no sign of life for {SILENT_S_MAX + LOOK_S:.0f} s"
        assert said == f"{silent} (it runs, and answers nothing): killing it"
        assert one.hung == [True]

    asyncio.run(work())


def test_a_child_that_was_stopped_is_killed_and_nothing_it_ran_is_to_blame(tmp_path: Path) -> None:
    async def work() -> None:
        async with watched(tmp_path, STAYS) as one:
            os.kill(one.child.pid, signal.SIGSTOP)
            await asyncio.to_thread(wait_until, lambda: _sleeps(one.child.pid))
            one.look(SILENT_S_MAX + 2 * LOOK_S)
            await one.ended.wait()
        assert "it was stopped by a signal" in one.said[0]
        assert one.hung == [False]

    asyncio.run(work())


def test_before_the_first_sign_a_child_has_more_time(tmp_path: Path) -> None:
    async def work() -> None:
        async with watched(tmp_path, "import time; time.sleep(600)", signs=0) as one:
            one.look(FIRST_SIGN_S_MAX)
            assert not one.said
            one.look(2 * LOOK_S)
            assert f"no sign of life for {FIRST_SIGN_S_MAX + LOOK_S:.0f} s" in one.said[0]

    asyncio.run(work())


def test_a_sign_begins_the_time_anew(tmp_path: Path) -> None:
    async def work() -> None:
        async with watched(tmp_path, STAYS) as one:
            for _ in range(3):
                one.look(SILENT_S_MAX)
                one.child.signs += 1
            assert not one.said

    asyncio.run(work())


@pytest.mark.parametrize("pause_s", [60.0, 86_400.0])
def test_no_child_is_to_blame_for_a_pause_of_the_machine(tmp_path: Path, pause_s: float) -> None:
    """A laptop that slept, a paused virtual machine, a machine on which nothing runs on time."""

    async def work() -> None:
        async with watched(tmp_path, STAYS) as one:
            one.look(SILENT_S_MAX / 2)
            one.look(10 * pause_s, every_s=pause_s)
            assert not one.said

    asyncio.run(work())


def test_signs_end_with_the_reader_and_never_block(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    life = SignOfLife(write_fd)
    assert not os.get_inheritable(write_fd)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write_fd, bytes(4096))
    assert life._show()  # the pipe is full
    os.close(read_fd)
    assert not life._show()
    os.close(write_fd)
    assert not SignOfLife(None)._show()
