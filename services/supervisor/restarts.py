"""restarts: replaces gateways, workers or all processes on request, one restart at a time.

millstream restart ─> control socket ─┐
SIGHUP ───────────────────────────────┴> Restarts.restart ─> Rolling, in a task that a shutdown cancels
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from millstream.services.errors import Code, Failure, invalid
from millstream.services.supervisor.child import Child
from millstream.services.supervisor.control import Event, ReportEvent
from millstream.services.supervisor.rolling import Ready, Rolling, Start

RESTARTS = ("all", "gateways", "workers")


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
