"""audit_rules: what an entry of the audit log has, and which refusals are written. Pure; time is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

TEXT_CHARACTERS_MAX = 512  # of an address, a path, …
#: Entries about refused calls of one key in a minute. Beyond, they are only counted: else a caller without rights could
#: push entries about changes out of the log.
REFUSALS_A_MINUTE = 10
_MINUTE_S = 60.0
_KEYS_MAX = 1024


class Refusals:
    """Bounds the entries about refused calls."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[float, int]] = {}  # by key: start of the minute, entries

    def may_write(self, key_id: str, now: float) -> bool:
        """Whether a refused call of a key is written. `now`: an instant of the monotonic clock."""
        began, count = self._written.get(key_id, (now, 0))
        if now - began >= _MINUTE_S:
            began, count = now, 0
        if len(self._written) >= _KEYS_MAX:
            self._written.clear()
        self._written[key_id] = (began, count + 1)
        return count < REFUSALS_A_MINUTE


class Who(NamedTuple):
    """Who made a call.

    Args:
        label: of the key; "": a caller on this machine without a key.
        key_id: of the key; "": there was none, or the admin key.
        address: from where.
    """

    label: str
    key_id: str
    address: str


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
        "by": who.label[:TEXT_CHARACTERS_MAX] or "local caller",
        "key": who.key_id,
        "address": who.address[:TEXT_CHARACTERS_MAX],
        "what": what[:TEXT_CHARACTERS_MAX],
        "target": target[:TEXT_CHARACTERS_MAX].encode("utf-8", "backslashreplace").decode(),
        "outcome": outcome,
        "changes": list(changes),
    }
