"""What the supervisor does after deaths: tells gateways why a worker died, and ends what children left behind.

worker died ─> CrashAnalyzer ─> announced to gateways, which requeue its batches
A process whose parent died becomes a child of this one (PR_SET_CHILD_SUBREAPER) ─> in no list for two looks ─> killed:
it would keep ports, files and memory. Linux only: elsewhere init adopts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from millstream.services.crashes.analyzer import CrashAnalyzer
from millstream.services.process.c_library import c_library
from millstream.services.process.cancellation import cancel_all
from millstream.services.process.waits import next_tick
from millstream.services.queue.death_notices import publish_death
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.url import RedisAddress
from millstream.services.supervisor.child import Child

log = logging.getLogger("millstream.supervisor")

LOOK_S = 5.0  # between two looks
_PR_SET_CHILD_SUBREAPER = 36
_TASKS = Path("/proc/self/task")


class Orphans:
    """Adopts and ends orphans of this process.

    Args:
        children: returns those that it started by itself.
    """

    def __init__(self, children: Callable[[], Iterable[Child]]) -> None:
        self._children = children
        self._seen: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        if sys.platform == "linux":
            c_library().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            self._tasks.append(asyncio.create_task(self._run(), name="orphans"))

    async def stop(self) -> None:
        """End all that are left, after the children have ended."""
        await cancel_all(self._tasks)
        if self._tasks:
            self.look()
            self.look()

    async def _run(self) -> None:
        while True:
            await next_tick(LOOK_S)
            self.look()

    def look(self) -> None:
        """End the orphans that the look before this one has seen: a child that just started is in no list yet."""
        own = {child.pid for child in self._children()}
        strangers = {pid for pid in _adopted() if pid not in own}
        for pid in strangers & self._seen:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # one that is killed now is reaped after the next look
        for pid in strangers - self._seen:
            log.info("process %d lost its parent", pid)
        self._seen = strangers


def _adopted() -> list[int]:
    """Return the children of this process that lead, or are in, sessions of others."""
    found = []
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                found += [int(pid) for pid in (task / "children").read_text().split()]
    session = os.getsid(0)
    return [pid for pid in found if _session(pid) not in {session, None}]


def _session(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return None


class DeathReports:
    """The reports of one supervisor."""

    def __init__(self, crashes: CrashAnalyzer, address: RedisAddress, keys: InstallationKeys) -> None:
        self._crashes = crashes
        self._address = address
        self._keys = keys
        self._notices: set[asyncio.Task[bool]] = set()

    async def report(self, child: Child) -> bool:
        """Announce the death of a worker; return whether a model is at fault."""
        # Before the restart: the new worker must already see which version not to load.
        report = await asyncio.to_thread(
            self._crashes.analyze, child.worker, child.code, planned=child.stopped, hung=child.hung
        )
        # Gateways requeue its batches now instead of after the lease.
        task = asyncio.create_task(publish_death(self._address, self._keys, report.death))
        self._notices.add(task)
        task.add_done_callback(self._notices.discard)
        return report.model_at_fault

    async def settle(self, seconds: float) -> None:
        """Return when all deaths are announced, or could not be; at the latest after some seconds."""
        if self._notices:
            _, late = await asyncio.wait(self._notices, timeout=seconds)
            for notice in late:
                notice.cancel()
