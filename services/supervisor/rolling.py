"""Rolling restart: replaces children one after the other, without interrupting service, one restart at a time.

millstream restart ─> control socket ─┐
SIGHUP ───────────────────────────────┴> Restarts.restart ─> Rolling, in a task that a shutdown cancels
start the new child beside the old one -> ready     -> the old one drains and ends -> next child
                                       -> not ready -> stop the new one, keep the old one, end the restart
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from millstream.services.errors import Code, Failure, invalid
from millstream.services.process.cancellation import cancel_all
from millstream.services.supervisor.child import Child
from millstream.services.supervisor.control import Event, ReportEvent
from millstream.services.supervisor.plan import Program

RESTARTS = ("all", "gateways", "workers")
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


class Restarts:
    """The rolling restarts of one installation.

    Args:
        groups: returns the lists of children to replace, in order, for each of RESTARTS.
        start: starts a program on trial.
        ready: called with the old and the new child; returns when the new one can take over, or raises Failure.
        drain_s: how long a child may take to stop.
        obstacle: returns why nothing can be restarted now, as in "millstream …"; empty: it can.
        show: shows a line to the user.
        announce: takes what a restart does when it begins; an empty text when it ended.
    """

    def __init__(
        self,
        groups: Callable[[], Mapping[str, Sequence[list[Child]]]],
        start: Start,
        ready: Ready,
        drain_s: float,
        obstacle: Callable[[], str],
        show: Callable[[str], None],
        announce: Callable[[str], None],
    ) -> None:
        self._groups = groups
        self._start = start
        self._ready = ready
        self._drain_s = drain_s
        self._obstacle = obstacle
        self._show = show
        self._announce = announce
        self._task: asyncio.Task[None] | None = None
        self._rolling: Rolling | None = None  # of that task

    @property
    def replaced_pool(self) -> str | None:
        """The pool of the worker that is being replaced, which counts twice until the old one ended; None: none is."""
        program = self._rolling.replacing if self._rolling is not None else None
        return program.pool if program is not None else None

    async def on_command(self, request: Event, report: ReportEvent) -> None:
        """Carry out a command of the control socket. Raises Failure."""
        what = request.get("restart")
        if what not in RESTARTS:
            raise invalid(f"restart one of {', '.join(RESTARTS)}")
        await self.restart(what, report)

    async def restart(self, what: str, report: ReportEvent) -> None:
        """Replace one of RESTARTS, process by process. Raises Failure, and shows it, if that is not possible now."""
        try:
            await self._roll(what, report)
        except Failure as failure:
            self._show(f"restart: {failure.message}")
            raise

    async def cancel(self) -> None:
        """Cancel a restart that is in progress: its command is told so."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _roll(self, what: str, report: ReportEvent) -> None:
        if obstacle := self._obstacle():
            raise Failure(Code.CONFLICT, f"millstream {obstacle}: nothing was restarted")
        if self._task is not None:
            raise Failure(Code.CONFLICT, "a restart is already in progress: wait for its end")
        self._rolling = Rolling(self._start, self._ready, self._drain_s)
        replacing = self._rolling.run(self._groups()[what], partial(self._report, report))
        self._task = asyncio.create_task(replacing, name="restart")
        self._announce(f"replacing {what}")
        try:
            # Waited for, not awaited: if the command that requested the restart is cancelled, the restart continues.
            await asyncio.wait({self._task})
            if self._task.cancelled():
                raise Failure(Code.UNAVAILABLE, "millstream is being stopped: the restart was not completed")
            self._task.result()
        finally:
            self._task = self._rolling = None
            self._announce("")

    def _report(self, report: ReportEvent, event: Event) -> None:
        if event["event"] == "replaced":
            before, pid, seconds = event["pid_before"], event["pid"], event["seconds"]
            self._show(f"{event['process']} was replaced in {seconds:.3g} s (pid {before} -> {pid})")
        report(event)
