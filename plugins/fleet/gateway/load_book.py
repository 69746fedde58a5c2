"""Counts what arrives and waits in this gateway, by pool, from what its lanes know: no request costs anything.

lanes in use since the last report ─> LoadBook.count ─> GatewayLoads

Rows that arrived are those that were answered or refused, and the change of those that wait or run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from millstream.gateway.scheduling.lane import Lane
from millstream.plugins.fleet.scaling import GatewayLoads, PoolLoad

RUN_S_MAX = 86_400.0  # run times beyond count as this: a profile may say anything


@dataclass(slots=True)
class _Seen:
    """A lane at the last report."""

    done: int = 0
    inside: int = 0  # rows that waited or ran
    row_s: float = 0.0  # as last measured: a pool without workers has no measurements


@dataclass(slots=True)
class _Sums:
    """The counters of one pool."""

    rows: int = 0
    work_s: float = 0.0
    unmeasured_rows: int = 0


class LoadBook:
    """The counters of one gateway."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[Lane, _Seen] = WeakKeyDictionary()
        self._inside: set[Lane] = set()  # lanes with rows inside at the last report
        self._sums: dict[str, _Sums] = {}
        self._began: float | None = None  # instant of the first report

    def count(self, used: Iterable[Lane], running: Mapping[Lane, int], now: float) -> GatewayLoads:
        """Return what was counted until now.

        Args:
            used: lanes that got a batch or refused a request since the last call, or in which requests wait.
            running: rows in flight of each lane that has some.
            now: the current instant (monotonic).
        """
        self._began = now if self._began is None else self._began
        queues: dict[str, PoolLoad] = {}
        lanes = {*used, *self._inside, *running}
        self._inside = set()
        for lane in lanes:
            seen = self._seen.setdefault(lane, _Seen())
            inside, done = lane.rows_waiting + running.get(lane, 0), lane.state.rows_done
            arrived = max(0, done - seen.done + inside - seen.inside)
            seen.done, seen.inside = done, inside
            seen.row_s = min(lane.policy.row_s or seen.row_s, RUN_S_MAX)
            sums = self._sums.setdefault(lane.pool, _Sums())
            sums.rows += arrived
            sums.work_s += arrived * seen.row_s
            if not seen.row_s:
                sums.unmeasured_rows += arrived
            if inside:
                self._inside.add(lane)
            queues[lane.pool] = _with_lane(queues.get(lane.pool, _EMPTY), lane, inside, seen.row_s, now)
        return GatewayLoads(
            pools={
                pool: queues.get(pool, _EMPTY).model_copy(
                    update={
                        "rows": sums.rows,
                        "work_s": round(sums.work_s, 6),
                        "unmeasured_rows": sums.unmeasured_rows,
                    }
                )
                for pool, sums in self._sums.items()
            },
            counted_s=round(now - self._began, 3),
        )


_EMPTY = PoolLoad()


def _with_lane(load: PoolLoad, lane: Lane, inside: int, row_s: float, now: float) -> PoolLoad:
    """Return the queue of a pool with that of one more lane."""
    return PoolLoad(
        queue_rows=load.queue_rows + inside,
        queue_work_s=load.queue_work_s + inside * row_s,
        oldest_wait_s=max(load.oldest_wait_s, now - lane.oldest_arrival),
        run_s=max(load.run_s, min(lane.policy.full_batch_s, RUN_S_MAX)),
    )
