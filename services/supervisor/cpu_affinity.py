"""Who keeps to which core, on a machine that has only two.

The kernel likes to wake a process on the core of the one that wakes it, on the guess that the waker is about to sleep.
A gateway that sends a batch is not: Redis then waits for it, or takes its core, while the other core idles. Apart, the
two served half as many requests again at 16 connections. With more cores there is mostly an idle one to wake up on.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Cores(NamedTuple):
    """The only cores a process may use; empty: any."""

    redis: frozenset[int] = frozenset()
    gateway: frozenset[int] = frozenset()
    workers: frozenset[int] = frozenset()


def keep_apart(available: Collection[int], *, gateways: int, worker_threads: int, embedded: bool) -> Cores:
    """`worker_threads`: of all workers together. `embedded`: Redis is ours.

    A single thread of all workers is beside Redis, which sleeps while it runs. More have the whole machine.
    """
    if len(available) != 2 or gateways != 1 or not embedded:
        return Cores()
    first, last = (frozenset({core}) for core in sorted(available))
    return Cores(redis=last, gateway=first, workers=last if worker_threads == 1 else frozenset())
