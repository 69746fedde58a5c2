"""Parts of the worker's record that change by themselves: when it is published, and the loads that were refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from millstream.services.placement.views import Refusal, RefusalKind
from millstream.services.process.printable import printable
from millstream.services.wire.records import ErrorRecord, RefusalRecord

#: Longest delay of changes that may be late: most loads end before, and are published once.
SOON_S = 0.05


class BeatSignal:
    """When the next beat is due. Safe for several threads. `lanes_unsure`: it is not known which lanes Redis has."""

    def __init__(self) -> None:
        self._due = float("inf")  # monotonic
        self._wake = threading.Condition()
        self.lanes_unsure = True

    def now(self) -> None:
        """Have a changed record published without waiting for the next interval."""
        self._within(0.0)

    def soon(self) -> None:
        """Have a changed record published within SOON_S, together with the changes that follow until then."""
        self._within(SOON_S)

    def add_lanes_again(self) -> None:
        """Have all lanes added with the next beat: it is not known which of them Redis has."""
        self.lanes_unsure = True
        self.now()

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until an earlier beat is asked for, also if that was during the last beat."""
        with self._wake:
            self._due = min(self._due, time.monotonic() + seconds)
            while (left_s := self._due - time.monotonic()) > 0:
                self._wake.wait(left_s)
            self._due = float("inf")

    def _within(self, seconds: float) -> None:
        with self._wake:
            due = time.monotonic() + seconds
            if due < self._due:
                self._due = due
                self._wake.notify()


ERRORS_MAX = 5  # of a version, beyond which the oldest is dropped
ERROR_CHARACTERS_MAX = 500
ERROR_VERSIONS_MAX = 200  # with errors; beyond, that is dropped whose last one is the oldest


class LastErrors:
    """The last errors of runs by content id, which outlive the instances. The main loop adds, other threads read."""

    def __init__(self) -> None:
        self._errors: dict[str, tuple[ErrorRecord, ...]] = {}

    def add(self, content_id: str, text: str) -> None:
        """Note an error: one with the text of another takes its place."""
        text = printable(text[:ERROR_CHARACTERS_MAX])
        known = self._errors.pop(content_id, ())
        count = 1 + sum(one.count for one in known if one.text == text)
        now = time.time()  # noqa: TID251 - an instant for people
        others = [one for one in known if one.text != text][1 - ERRORS_MAX :]
        self._errors[content_id] = (*others, ErrorRecord(at=now, text=text, count=count))
        while len(self._errors) > ERROR_VERSIONS_MAX:
            del self._errors[next(iter(self._errors))]

    def of(self, content_id: str) -> tuple[ErrorRecord, ...]:
        """Return the errors of a version, the same object until there is another one."""
        return self._errors.get(content_id, ())


REFUSALS_MAX = 1000  # beyond, the oldest is dropped
LOGGED_AGAIN_S = 60.0  # interval at which the refusal of a version for the same kind of reason is logged again
RETRY_S_MIN = 1.0  # a refusal is published for this time at least, so that every gateway reads it


class Refusals:
    """Refusals by content id. Safe for several threads.

    Args:
        on_redis_clock: returns an instant of `now` on the Redis clock, on which it is published.
    """

    def __init__(
        self,
        signal: BeatSignal,
        now: Callable[[], float],
        on_redis_clock: Callable[[float], float] = lambda at: at,
    ) -> None:
        self._signal = signal
        self._now = now
        self._on_redis_clock = on_redis_clock
        self._lock = threading.Lock()
        self._refusals: dict[str, RefusalRecord] = {}  # `until` is an instant of `now`
        self._logged: dict[str, tuple[RefusalKind, float]] = {}  # by content id: its last line, and when

    def add(self, content_id: str, refusal: Refusal) -> None:
        """Publish why a version is not loaded, until it is worth another try."""
        until = self._now() + max(RETRY_S_MIN, refusal.retry_after_s)
        record = RefusalRecord(content_id=content_id, kind=refusal.kind.value, reason=refusal.reason, until=until)
        with self._lock:
            self._refusals.pop(content_id, None)
            self._refusals[content_id] = record
            while len(self._refusals) > REFUSALS_MAX:
                del self._refusals[next(iter(self._refusals))]
        self._signal.now()

    def first(self, content_id: str, kind: RefusalKind) -> bool:
        """Return whether a refusal is worth a line in the log: each kind once in LOGGED_AGAIN_S for a version."""
        now = self._now()
        with self._lock:
            known, at = self._logged.get(content_id, (None, 0.0))
            if known is kind and now - at < LOGGED_AGAIN_S:
                return False
            self._logged.pop(content_id, None)
            self._logged[content_id] = kind, now
            while len(self._logged) > REFUSALS_MAX:
                del self._logged[next(iter(self._logged))]
        return True

    def remove(self, content_id: str) -> None:
        """Forget a refusal: the version is loaded now, or was removed."""
        with self._lock:
            known = self._refusals.pop(content_id, None)
        if known is not None:
            self._signal.now()

    def of(self, content_id: str) -> RefusalRecord | None:
        """Return the refusal of a version that still holds. Its `until` is monotonic."""
        known = self._refusals.get(content_id)
        return known if known is not None and known.until > self._now() else None

    def records(self) -> tuple[RefusalRecord, ...]:
        """Return the refusals to publish; those whose time has passed are dropped."""
        now = self._now()
        with self._lock:
            for content_id in [one for one, record in self._refusals.items() if record.until <= now]:
                del self._refusals[content_id]
            return tuple(
                one.model_copy(update={"until": self._on_redis_clock(one.until)}) for one in self._refusals.values()
            )
