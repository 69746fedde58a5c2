"""Assigns processes to cores on a machine that has only two.

The kernel tends to wake a process on its waker's core, assuming that the waker is about to sleep. A gateway that sends
a batch does not sleep: Redis then waits for the gateway or takes its core, while the other core idles. On separate
cores, the two served 1.5 times as many requests at 16 connections. With more cores one is usually idle.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Cores(NamedTuple):
    """The cores each kind of process is pinned to; empty for any."""

    redis: frozenset[int] = frozenset()
    gateway: frozenset[int] = frozenset()
    workers: frozenset[int] = frozenset()


def assign_cores(available: Collection[int], *, gateways: int, worker_threads: int, embedded: bool) -> Cores:
    """Assign the gateway and the embedded Redis to different cores, if there are exactly two and one gateway.

    A single worker thread shares the core of Redis, which sleeps while the thread runs; more threads use both cores.
    `worker_threads` counts those of all workers; `embedded` says whether Redis is started by us.
    """
    if len(available) != 2 or gateways != 1 or not embedded:
        return Cores()
    first, last = (frozenset({core}) for core in sorted(available))
    return Cores(redis=last, gateway=first, workers=last if worker_threads == 1 else frozenset())
