"""Threads of loads: each does one piece of work, and another one takes its place."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

import pytest

from millstream.workers.residency.loader import LoadThreads
from tests.kit.wait import wait_until


def _do(threads: LoadThreads) -> int:
    """Return which thread does a piece of work."""
    done: list[int] = []
    ended = threading.Event()

    def work() -> None:
        done.append(threading.get_native_id())
        ended.set()

    threads.run(work)
    assert ended.wait(120)
    return done[0]


def test_a_thread_does_one_piece_of_work() -> None:
    threads = LoadThreads(2)
    threads.renew()
    assert threads.waiting == 2
    assert _do(threads) != _do(threads)
    wait_until(lambda: threads.waiting == 0, what="both at work")
    threads.renew()
    assert threads.waiting == 2


def test_work_waits_for_a_thread_that_could_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = LoadThreads(1)
    with monkeypatch.context() as short:
        short.setattr(_thread, "start_new_thread", _refuse)
        threads.renew()
        short.setattr(_thread, "start_new_thread", _never_begin)
        short.setattr("millstream.workers.residency.loader.BEGIN_S_MAX", 0.01)
        threads.renew()
    assert threads.waiting == 0
    ended = threading.Event()
    threads.run(ended.set)
    threads.renew()
    assert ended.wait(120)


def _refuse(_function: Callable[..., None], _arguments: tuple[object, ...]) -> int:
    raise RuntimeError("can't start new thread")


def _never_begin(_function: Callable[..., None], _arguments: tuple[object, ...]) -> int:
    return 0
