"""A call that ends before its run counts as a call of its key until the run has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.gateway.scheduling.completion import ABANDON_S
from millstream.gateway.scheduling.request import Request
from millstream.services.access.document import Limits
from millstream.services.access.limits import Account
from millstream.services.errors import Code
from tests.kit.lane_harness import LaneBench


@pytest.fixture
def bench(tmp_path: Path) -> LaneBench:
    return LaneBench(tmp_path, {1: 0.01, 8: 0.02})


@pytest.fixture
def account() -> Account:
    return Account("team", Limits(concurrency=4), 0.0)


def called(bench: LaneBench, account: Account, timeout_s: float = 60.0) -> Request:
    """Return the request of a call that was let in."""
    account.enter(bench.now)
    request = bench.request(timeout_s=timeout_s)
    request.account = account
    bench.lane.add(request, 16)
    return request


def left(bench: LaneBench, account: Account, request: Request) -> None:
    """End a call as a connection does whose client is gone."""
    account.leave()
    bench.lane.cancel(request)


def test_a_call_that_waits_ends_at_once(bench: LaneBench, account: Account) -> None:
    left(bench, account, called(bench, account))
    bench.turn()
    assert (bench.put, account.in_flight) == ([], 0)


def test_a_run_counts_until_its_reply(bench: LaneBench, account: Account) -> None:
    requests = [called(bench, account) for _ in range(3)]
    bench.turn()
    assert bench.put == [3]
    for request in requests[:2]:
        left(bench, account, request)
        bench.lane.cancel(request)  # once more: it is not counted twice
    assert account.in_flight == 3
    bench.answer()
    assert account.in_flight == 1  # its caller has the reply, and leaves
    account.leave()
    assert not bench.pending


def test_a_run_counts_after_the_deadline_until_it_is_forgotten(bench: LaneBench, account: Account) -> None:
    request = called(bench, account, timeout_s=1.0)
    bench.turn()
    [batch] = bench.pending.values()
    bench.now = 2.0
    bench.lane.recovery.expire(batch, bench.now)
    assert request.done
    account.leave()
    assert account.in_flight == 1
    bench.lane.recovery.expire(batch, 1.0 + ABANDON_S + 1)
    assert account.in_flight == 0


def test_a_lost_batch_is_put_again_without_the_callers_that_left(bench: LaneBench, account: Account) -> None:
    gone, stays = called(bench, account), called(bench, account)
    bench.turn()
    left(bench, account, gone)
    [batch] = bench.pending.values()
    bench.lane.recovery.put_again(batch)
    assert account.in_flight == 1
    [batch] = bench.pending.values()
    assert batch.requests == [stays]


def test_a_key_without_limits_is_not_counted(bench: LaneBench) -> None:
    request = bench.request()
    bench.lane.add(request, 16)
    bench.turn()
    bench.lane.cancel(request)
    [batch] = bench.pending.values()
    assert batch.outlived is None
    bench.answer()


def test_a_run_is_ended_once_all_callers_of_its_batch_have_gone(bench: LaneBench, account: Account) -> None:
    requests = [called(bench, account) for _ in range(2)]
    bench.turn()
    [batch] = bench.pending.values()
    for request in requests:
        bench.lane.recovery.leave(batch, bench.now)
        assert bench.link.left == []
        left(bench, account, request)
    bench.now = 10.0
    bench.lane.recovery.leave(batch, bench.now)
    assert bench.link.left == [(batch.name, 50.0)]
    assert batch.left
    bench.answer(failures={at: [Code.CANCELLED.value, "gone"] for at in (0, 1)})
    assert (bench.pending, account.in_flight) == ({}, 0)


def test_at_the_deadline_its_worker_ends_a_run_itself(bench: LaneBench, account: Account) -> None:
    called(bench, account, timeout_s=1.0)
    bench.turn()
    [batch] = bench.pending.values()
    bench.now = 1.0
    bench.lane.recovery.expire(batch, bench.now)
    bench.lane.recovery.leave(batch, bench.now)
    assert bench.link.left == []
