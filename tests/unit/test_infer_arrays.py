"""Long reading and writing happens apart from the event loop, and little of it at once."""

from __future__ import annotations

import asyncio
import threading

from millstream.services.process.threads import LARGE_BYTES_MIN, LARGE_THREADS_MAX, run_in_thread_if_large


def test_short_work_is_done_at_once() -> None:
    assert asyncio.run(run_in_thread_if_large(LARGE_BYTES_MIN - 1, threading.get_ident)) == threading.get_ident()


def test_long_work_is_done_apart_and_little_of_it_at_once() -> None:
    at_once = threading.Semaphore(LARGE_THREADS_MAX)

    def work() -> int:
        assert at_once.acquire(blocking=False)
        try:
            return threading.get_ident()
        finally:
            at_once.release()

    async def all_of_it() -> list[int]:
        return await asyncio.gather(*(run_in_thread_if_large(LARGE_BYTES_MIN, work) for _ in range(50)))

    assert threading.get_ident() not in asyncio.run(all_of_it())
