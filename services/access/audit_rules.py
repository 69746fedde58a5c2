"""audit_rules: what an entry of the audit log has, and which refusals are written. Pure; time is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

TEXT_CHARACTERS_MAX = 512  # of an address, a path, …
#: Entries about refused calls of one key in a minute. Beyond, they are only counted: else a caller without rights, or
#: one with rights and wrong calls, could push entries about changes out of the log.
REFUSALS_A_MINUTE = 10
MINUTE_S = 60.0
KEYS_MAX = 1024  # keys whose refusals are counted apart; the others share one count
_OTHERS = "(others)"


class Who(NamedTuple):
    """Who made a call.

    Args:
        label: of the key; "": there was none, and none was needed.
        key_id: of the key; "": there was none, or the admin key.
        address: from where.
    """

    label: str
    key_id: str
    address: str


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


def audit_entry(
    now: float, who: Who, what: str, target: str, outcome: int | str, changes: Sequence[str]
) -> dict[str, Any]:
    """Return an entry of the audit log.

    Args:
        now: seconds since the epoch.
        who: made the call.
        what: the operation.
        target: method and path, or the full name of a gRPC method.
        outcome: the HTTP status, or the gRPC status code.
        changes: what the operation says that it changed.
    """
    return {
        "at": round(now, 3),
        "time": datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
        "by": who.label[:TEXT_CHARACTERS_MAX] or "without a key",
        "key": who.key_id,
        "address": who.address[:TEXT_CHARACTERS_MAX],
        "what": what[:TEXT_CHARACTERS_MAX],
        "target": target[:TEXT_CHARACTERS_MAX].encode("utf-8", "backslashreplace").decode(),
        "outcome": outcome,
        "changes": list(changes),
    }
