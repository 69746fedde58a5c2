"""When replies without a receipt are sent beside the main loop, and how often. Time is moved by the test."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.services.errors import Code, Failure
from millstream.workers.batches.consumer import Finished
from millstream.workers.run_reports import AGAIN_S, OVERDUE_S, OverdueReplies
from tests.unit.test_runner import lease


class Redis:
    """A connection to Redis that takes replies while `up`; and the main loop, with its unsettled replies."""

    def __init__(self) -> None:
        self.up = True
        self.attempts = 0
        self.taken: list[Finished] = []
        self.kept: list[tuple[float, Finished]] = []  # each with when it was sent to its gateway
        self.now = 100.0
        loop: Any = self
        connect: Any = self.connect
        self.overdue = OverdueReplies(connect, loop, lambda: self.now)

    def unsettled(self, older_s: float) -> list[Finished]:
        return [finished for sent_at, finished in self.kept if sent_at <= self.now - older_s]

    def send(self) -> Finished:
        finished = Finished(lease([1]), b"reply", b"")
        self.kept.append((self.now, finished))
        return finished

    def connect(self) -> Redis:
        self.attempts += 1
        if not self.up:
            raise Failure(Code.UNAVAILABLE, "Redis is not reachable")
        return self

    def reply_beside_main_loop(self, finished: list[Finished]) -> None:
        self.taken += finished

    def close(self) -> None: ...

    def look(self) -> list[Finished]:
        """Let the watchdog look; return what Redis took since the last look."""
        self.taken = []
        self.overdue.look()
        if self.overdue._sending is not None:
            self.overdue._sending.join()
        return self.taken


def test_a_reply_is_sent_once_when_it_is_overdue() -> None:
    redis = Redis()
    first = redis.send()
    assert (redis.look(), redis.attempts) == ([], 0)
    redis.now += OVERDUE_S / 2
    second = redis.send()
    redis.now += OVERDUE_S / 2
    assert redis.look() == [first]
    assert redis.look() == []
    redis.now += OVERDUE_S / 2
    assert redis.look() == [second]
    redis.kept.clear()  # the main loop has settled them
    assert redis.look() == []
    assert not redis.overdue._sent


def test_a_redis_that_is_away_is_asked_again_after_a_pause(caplog: pytest.LogCaptureFixture) -> None:
    redis = Redis()
    redis.up = False
    finished = redis.send()
    redis.now += OVERDUE_S
    for _ in range(5):
        assert redis.look() == []
    assert (redis.attempts, len(caplog.messages)) == (1, 1)
    redis.up = True
    redis.now += AGAIN_S
    assert redis.look() == [finished]
