"""Rolling restart: replaces children one after the other, without interrupting service.

start the new child beside the old one -> ready     -> the old one drains and ends -> next child
                                       -> not ready -> stop the new one, keep the old one, end the restart
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from millstream.services.errors import Code, Failure
from millstream.services.process.cancel import cancel_all
from millstream.services.supervisor.child import Child
from millstream.services.supervisor.control import ReportEvent
from millstream.services.supervisor.plan import Program

Start = Callable[[Program], Child]
Ready = Callable[[Child, Child], Awaitable[None]]


class Rolling:
    """Replaces children. When cancelled, leaves all running children in the caller's lists, for the caller to stop.

    `replacing`: the program that is being replaced now, with two processes; None: none is.

    Args:
        start: starts a program on trial.
        ready: called with the old and the new child; returns when the new one can take over, or raises Failure.
        drain_s: how long a child may take to stop.
    """

    def __init__(self, start: Start, ready: Ready, drain_s: float) -> None:
        self.replacing: Program | None = None
        self._start = start
        self._ready = ready
        self._drain_s = drain_s

    async def run(self, groups: Sequence[list[Child]], report: ReportEvent) -> None:
        """Replace every child that a group has now, in order. A child that left meanwhile is not replaced.

        Raises Failure at the first whose replacement is not ready.
        """
        remaining = [(children, child) for children in groups for child in children]
        replaced = 0
        while remaining:
            children, old = remaining.pop(0)
            if old not in children:  # its pool became smaller
                continue
            count = replaced + 1 + sum(child in group for group, child in remaining)
            report({"event": "starting", "process": old.program.name, "of": count, "replaced": replaced})
            self.replacing = old.program
            try:
                await self._replace(children, old, report)
            except Failure as failure:
                outcome = f"{replaced} of {count} processes were replaced" if replaced else "nothing was replaced"
                raise Failure(failure.code, f"{failure.message} ({outcome})") from failure
            finally:
                self.replacing = None
            replaced += 1

    async def _replace(self, children: list[Child], old: Child, report: ReportEvent) -> None:
        began = time.monotonic()
        before = old.pid
        new = self._start(old.program)
        children.append(new)
        try:
            await self._wait_until_ready(old, new)
        except Failure as failure:
            # It may have accepted requests, which it answers first.
            await new.stop(self._drain_s)
            children.remove(new)
            raise Failure(
                failure.code,
                f"{old.program.name} was not replaced and keeps serving: its replacement was not ready: "
                f"{failure.message} (log: {new.log_path})",
            ) from failure
        children.remove(new)
        children[children.index(old)] = new
        children.append(old)  # until it has ended: a shutdown stops it, too
        await old.stop(self._drain_s)
        children.remove(old)
        seconds = round(time.monotonic() - began, 3)
        name = new.program.name
        report({"event": "replaced", "process": name, "pid_before": before, "pid": new.pid, "seconds": seconds})

    async def _wait_until_ready(self, old: Child, new: Child) -> None:
        ready, ended = (
            asyncio.ensure_future(self._ready(old, new)),
            asyncio.ensure_future(new.ended()),
        )
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
            if not new.end_trial():
                last_line = f": {new.last_line}" if new.last_line else ""
                raise Failure(Code.UNAVAILABLE, f"it {new.exit_description}{last_line}")
        finally:
            await cancel_all((ready, ended))
