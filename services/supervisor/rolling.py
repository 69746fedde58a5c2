"""rolling: replaces children one after the other, so that somebody serves throughout.

the new one starts beside the old one -> is ready -> the old one drains and ends -> the next child
                                      -> is not   -> the new one goes, the old one stays, the rest is left alone
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from millstream.services.errors import Code, Failure
from millstream.services.process.cancel import cancel_all
from millstream.services.supervisor.child import Child
from millstream.services.supervisor.control import Tell
from millstream.services.supervisor.plan import Program

Start = Callable[[Program], Child]
Ready = Callable[[Child, Child], Awaitable[None]]


class Rolling:
    """`start`: starts a program, on trial. `ready(old, new)`: returns when `new` can do what `old` does, or raises Failure.

    Cancelled, it leaves all that runs in the lists it was given, for others to stop.
    """

    def __init__(self, start: Start, ready: Ready, drain_s: float) -> None:
        self._start = start
        self._ready = ready
        self._drain_s = drain_s

    async def run(self, groups: Sequence[list[Child]], tell: Tell) -> None:
        """Replace every child of every group, in place. Raises Failure at the first whose replacement is not ready."""
        number = sum(map(len, groups))
        replaced = 0
        for children in groups:
            for place in range(len(children)):
                tell({"event": "starting", "process": children[place].program.name, "of": number, "replaced": replaced})
                try:
                    await self._replace(children, place, tell)
                except Failure as failure:
                    left = f"{replaced} of {number} processes were replaced" if replaced else "nothing was replaced"
                    raise Failure(failure.code, f"{failure.message} ({left})") from failure
                replaced += 1

    async def _replace(self, children: list[Child], place: int, tell: Tell) -> None:
        began = time.monotonic()
        old = children[place]
        before = old.pid
        new = self._start(old.program)
        children.append(new)
        try:
            await self._until_ready(old, new)
        except Failure as failure:
            # It may have taken requests: it answers them first.
            await new.stop(self._drain_s)
            children.remove(new)
            raise Failure(
                failure.code,
                f"{old.program.name} was not replaced and serves on: its replacement was not ready: {failure.message} "
                f"(log: {new.log_path})",
            ) from failure
        children[place], children[-1] = new, old
        await old.stop(self._drain_s)
        children.remove(old)
        seconds = round(time.monotonic() - began, 3)
        name = new.program.name
        tell({"event": "replaced", "process": name, "pid_before": before, "pid": new.pid, "seconds": seconds})

    async def _until_ready(self, old: Child, new: Child) -> None:
        ready, ended = (
            asyncio.ensure_future(self._ready(old, new)),
            asyncio.ensure_future(new.ended()),
        )
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
            if not new.keep():
                said = f": {new.last_line}" if new.last_line else ""
                raise Failure(Code.UNAVAILABLE, f"it {new.how}{said}")
        finally:
            await cancel_all((ready, ended))
