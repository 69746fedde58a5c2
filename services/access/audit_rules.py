"""What an entry of the audit log has, and which refusals are written. Pure; time is passed in."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from math import inf
from typing import Any, NamedTuple

from millstream.services.process.audit import Changes

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


class Wanted(NamedTuple):
    """Which entries are wanted.

    Args:
        key: id or name of the key, or the whole `by`; None: any.
        model: glob of the model's name; None: any.
        since, until: seconds since the epoch.
    """

    key: str | None = None
    model: str | None = None
    since: float = -inf
    until: float = inf

    def matches(self, entry: Mapping[str, Any]) -> bool:
        """Whether an entry is wanted."""
        by, at = str(entry.get("by", "")), entry.get("at")
        if self.key is not None and self.key not in {entry.get("key"), by} and not by.endswith(f" ({self.key})"):
            return False
        if self.model is not None and not fnmatchcase(str(entry.get("model") or ""), self.model):
            return False
        return self.since <= (at if isinstance(at, int | float) else 0.0) < self.until


def audit_entry(now: float, who: Who, what: str, target: str, outcome: int | str, changes: Changes) -> dict[str, Any]:
    """Return an entry of the audit log.

    Args:
        now: seconds since the epoch.
        who: made the call.
        what: the operation.
        target: method and path, or the full name of a gRPC method.
        outcome: the HTTP status, or the gRPC status code.
        changes: what the operation says that it changed, and of which model.
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
        "model": changes.model[:TEXT_CHARACTERS_MAX],
        "changes": changes.texts,
    }
