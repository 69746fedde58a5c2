"""Writes entries of the audit log, and bounds those about refused calls.

a call that changes something ─> AuditTrail.write ─> refused too often? ─no──> entry
                                                                        ─yes─> counted, and told once a minute
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from millstream.services.access.audit_log import AuditLog, Who, audit_entry
from millstream.services.errors import Failure
from millstream.services.process.audit import Changes
from millstream.services.process.threads import in_storage_thread

log = logging.getLogger("millstream.admin")

CLOSE_S_MAX = 3.0  # time for the entries that are written when the gateway stops; beyond, they are left out
#: Entries about refused calls of one key in a minute. Beyond, they are only counted: else a caller without rights, or
#: one with rights and wrong calls, could push entries about changes out of the log.
REFUSALS_A_MINUTE = 10
MINUTE_S = 60.0
KEYS_MAX = 1024  # keys whose refusals are counted apart; the others share one count
_OTHERS = "(others)"


class _Minute:
    """The refused calls of one key since an instant."""

    __slots__ = ("began", "left_out", "who", "written")

    def __init__(self, who: Who, began: float) -> None:
        self.who = who  # the first caller whose entry was left out
        self.began = began
        self.written = 0
        self.left_out = 0


class Refusals:
    """Bounds the entries about refused calls, and counts those that are left out."""

    def __init__(self) -> None:
        self._minutes: dict[str, _Minute] = {}  # by key

    @property
    def any_left_out(self) -> bool:
        """Whether `left_out` has something to return, now or later."""
        return any(minute.left_out for minute in self._minutes.values())

    def may_write(self, who: Who, now: float) -> bool:
        """Whether a refused call is written; else it is counted. `now`: an instant of the monotonic clock."""
        key = who.key_id
        if key not in self._minutes and len(self._minutes) >= KEYS_MAX:
            self._forget_ended(now)
            key = key if len(self._minutes) < KEYS_MAX else _OTHERS
        minute = self._minutes.get(key)
        if minute is None or (now - minute.began >= MINUTE_S and not minute.left_out):
            minute = self._minutes[key] = _Minute(who, now)
        if now - minute.began < MINUTE_S and minute.written < REFUSALS_A_MINUTE:
            minute.written += 1
            return True
        if not minute.left_out:
            minute.who = who
        minute.left_out += 1
        return False

    def left_out(self, now: float) -> list[tuple[Who, int]]:
        """Return and forget who had entries left out in minutes that have ended, and how many.

        `now`: as in `may_write`; infinity for the minutes that have not ended, too.
        """
        ended = [minute for minute in self._minutes.values() if minute.left_out and now - minute.began >= MINUTE_S]
        for minute in ended:
            minute.began, minute.written = now, 0
        found = [(minute.who, minute.left_out) for minute in ended]
        for minute in ended:
            minute.left_out = 0
        return found

    def _forget_ended(self, now: float) -> None:
        for key, minute in list(self._minutes.items()):
            if now - minute.began >= MINUTE_S and not minute.left_out:
                del self._minutes[key]


class AuditTrail:
    """The audit entries of one protocol. `monotonic`: returns seconds of a clock for rates."""

    def __init__(self, audit: AuditLog, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._audit = audit
        self._monotonic = monotonic
        self._refusals = Refusals()
        self._timer: asyncio.TimerHandle | None = None
        self._telling: asyncio.Task[None] | None = None

    async def write(
        self, who: Who, what: str, target: str, outcome: int | str, changes: Changes, *, refused: bool
    ) -> None:
        """Write an entry; one about a refused call is only counted if its caller has too many.

        A failure to write is logged: the call itself has been made. Arguments as in `audit_entry`.
        """
        if refused and not self._refusals.may_write(who, self._monotonic()):
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(MINUTE_S, self._tell)
            return
        await self._append(who, what, target, outcome, changes)

    def _tell(self) -> None:
        self._timer = None
        self._telling = asyncio.ensure_future(self.tell_left_out())

    async def tell_left_out(self) -> None:
        """Write how many entries were left out, of each caller, in minutes that have ended."""
        await self._tell_until(self._monotonic())
        if self._timer is None and self._refusals.any_left_out:
            self._timer = asyncio.get_running_loop().call_later(MINUTE_S, self._tell)

    async def close(self) -> None:
        """Write how many entries were left out, also in minutes that have not ended: the gateway stops.

        Gives up after CLOSE_S_MAX, with a log line: the file system may hang.
        """
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                if self._telling is not None:
                    await self._telling
                await self._tell_until(math.inf)
        except TimeoutError:
            log.error(  # noqa: TRY400 - one line is enough
                "the audit log does not say how many refused calls have no entry: writing took more than %g s",
                CLOSE_S_MAX,
            )
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _tell_until(self, now: float) -> None:
        for who, count in self._refusals.left_out(now):
            changes = Changes()
            changes.texts.append(f"{count} refused calls within a minute have no entry")
            await self._append(who, "left_out", "", "refused", changes)

    async def _append(self, who: Who, what: str, target: str, outcome: int | str, changes: Changes) -> None:
        now = time.time()  # noqa: TID251 - for people
        entry: dict[str, Any] = audit_entry(now, who, what, target, outcome, changes)
        try:
            await in_storage_thread(self._audit.append, entry)
        except Failure as failure:
            log.error("no audit entry: %s: %s", failure.message, entry)  # noqa: TRY400 - one line is enough
