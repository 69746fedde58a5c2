"""Kills children that show no sign of life, so that they are started again.

SignOfLife of a child, answers of the embedded Redis ─> Child.signs ─> Liveness.look ─> Child.kill_frozen

Only time in which this process itself runs on time counts: after a pause of the machine, or while it is so busy that
nothing runs, no child is to blame.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from millstream.services.process.cancellation import cancel_all
from millstream.services.process.waits import next_tick
from millstream.services.supervisor.child import Child

log = logging.getLogger("millstream.supervisor")

LOOK_S = 2.0  # between two looks
LATE_S = 1.0  # is counted for a look that came late: children had as little time as this process, or none
PING_S = 5.0  # between two pings of Redis, each on a connection of its own
SILENT_S_MAX = 30.0  # without a sign of life, after which a child is killed
#: the same before a child's first sign: it may import libraries from a slow disk, or search for devices
FIRST_SIGN_S_MAX = 300.0
ANSWER_S_MAX = 10.0  # for an answer of Redis to a ping

#: why a process does nothing, by its state in proc_pid_stat(5)
_STOPPED: Final = "T"
_TRACED: Final = "t"  # a debugger holds it
_STATES: Final = {_STOPPED: "it was stopped by a signal", "D": "it waits for a disk or a device"}


class _Seen(NamedTuple):
    """What was last seen of one start of a child."""

    signs: int
    silent_s: float


class Liveness:
    """Watches the children of one supervisor.

    Args:
        children: returns those to watch.
    """

    def __init__(self, children: Callable[[], Iterable[Child]]) -> None:
        self._children = children
        self._seen: dict[str, _Seen] = {}  # by start id
        self._looked_at = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks.append(asyncio.create_task(self._run(), name="liveness"))

    def ping(self, redis: Child, path: Path) -> None:
        """Take the answers of the Redis that listens on `path` for signs of its process, which shows none by itself."""
        self._tasks.append(asyncio.create_task(_ping_always(redis, path), name="ping Redis"))

    async def stop(self) -> None:
        await cancel_all(self._tasks)

    async def _run(self) -> None:
        while True:
            await next_tick(LOOK_S)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Count the seconds since the last look, and kill children that were silent for too long."""
        passed_s, self._looked_at = now - self._looked_at, now
        counted_s = passed_s if passed_s < LOOK_S + LATE_S else LATE_S
        before, self._seen = self._seen, {}
        for child in self._children():
            if not child.pid or child.stopped:
                continue
            seen = before.get(child.start_id, _Seen(0, 0.0))
            if child.signs != seen.signs:
                self._seen[child.start_id] = _Seen(child.signs, 0.0)
                continue
            silent_s = seen.silent_s + counted_s
            if silent_s > SILENT_S_MAX and self._end(child, silent_s):
                silent_s = 0.0
            self._seen[child.start_id] = _Seen(child.signs, silent_s)

    def _end(self, child: Child, silent_s: float) -> bool:
        """Kill a child, unless it is still starting, or a debugger holds it; returns whether to count from 0."""
        state = _state(child.pid)
        if state == _TRACED:
            return True
        if not child.signs and state != _STOPPED and silent_s <= FIRST_SIGN_S_MAX:
            return False
        why = _STATES.get(state, "it runs, and answers nothing")
        child.kill_frozen(f"has shown no sign of life for {silent_s:.0f} s ({why})", hung=state not in _STATES)
        return True


def _state(pid: int) -> str:
    """Return the letter of a process' state; "" if it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


async def _ping_always(redis: Child, path: Path) -> None:
    """Ping the Redis that a child runs; every answer, errors too, counts as a sign of the child."""
    while True:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_S_MAX):
                reader, writer = await asyncio.open_unix_connection(path)
                try:
                    writer.write(b"PING\r\n")
                    redis.signs += bool(await reader.read(64))
                finally:
                    writer.transport.abort()
        await next_tick(PING_S)
