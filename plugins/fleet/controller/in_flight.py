"""The orders that were given and are not carried out yet. Pure.

order given ─> InFlight.add ─> settle(records of workers, now) ─> carried out | refused | failed | lost
No order is given twice while it is in flight, and their number is bounded, for each worker and in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Literal, NamedTuple

from millstream.services.wire.records import InstanceRecord, State, WorkerRecord

#: Orders in flight: a worker loads one version after the other, and a later round knows better what to load.
OF_WORKER_MAX = 4
IN_FLIGHT_MAX = 256
#: An order that shows no effect for this time is given up, and may be given again.
NO_EFFECT_S_MAX = 30.0

_IN_PROGRESS = frozenset({State.LOADING, State.WARMING})


class Outcome(StrEnum):
    """What became of an order: a label of metrics."""

    DONE = "done"
    REFUSED = "refused"  # the worker does not load it: no memory, or another reason that it published
    FAILED = "failed"  # the load failed
    LOST = "lost"  # the worker is gone, or showed no effect in time


class Given(NamedTuple):
    """An order that was given."""

    worker: str
    content_id: str
    do: Literal["load", "unload"]
    given_at: float


class Settled(NamedTuple):
    """An order that is in flight no longer. `detail`: why it was not carried out."""

    order: Given
    outcome: Outcome
    detail: str = ""


class InFlight:
    """The orders in flight of one leader."""

    def __init__(self) -> None:
        self._orders: dict[tuple[str, str], Given] = {}
        self._of_worker: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._orders)

    def admits(self, worker: str, content_id: str) -> bool:
        """Return whether an order may be given now."""
        return (
            (worker, content_id) not in self._orders
            and len(self._orders) < IN_FLIGHT_MAX
            and self._of_worker.get(worker, 0) < OF_WORKER_MAX
        )

    def add(self, given: Given) -> None:
        """Record an order that was given."""
        key = (given.worker, given.content_id)
        if key not in self._orders:
            self._of_worker[given.worker] = self._of_worker.get(given.worker, 0) + 1
        self._orders[key] = given

    def clear(self) -> None:
        """Forget all orders: another controller leads."""
        self._orders.clear()
        self._of_worker.clear()

    def settle(self, workers: Sequence[WorkerRecord], now: float) -> list[Settled]:
        """Remove the orders that the records show as carried out, and those that will not be; return them."""
        records = {worker.id: worker for worker in workers}
        instances: dict[str, dict[str, InstanceRecord]] = {}
        settled: list[Settled] = []
        for given in self._orders.values():
            record = records.get(given.worker)
            if record is None:
                gone = Settled(given, Outcome.LOST, "the worker is gone")
                settled.append(Settled(given, Outcome.DONE) if given.do == "unload" else gone)
                continue
            if given.worker not in instances:
                instances[given.worker] = {instance.content_id: instance for instance in record.instances}
            settled.extend(_settled(given, record, instances[given.worker].get(given.content_id), now))
        for one in settled:
            del self._orders[one.order.worker, one.order.content_id]
            left = self._of_worker[one.order.worker] - 1
            if left:
                self._of_worker[one.order.worker] = left
            else:
                del self._of_worker[one.order.worker]
        return settled


def _settled(given: Given, record: WorkerRecord, instance: InstanceRecord | None, now: float) -> Iterator[Settled]:
    if given.do == "unload":
        if instance is None:
            yield Settled(given, Outcome.DONE)
        elif instance.state is not State.DRAINING and now - given.given_at > NO_EFFECT_S_MAX:
            yield Settled(given, Outcome.LOST, "the instance is still there")
        return
    if instance is not None and instance.state is State.READY:
        yield Settled(given, Outcome.DONE)
    elif instance is not None and instance.state is State.FAILED:
        yield Settled(given, Outcome.FAILED, instance.reason or "")
    elif instance is None or instance.state not in _IN_PROGRESS:
        refusals = [refusal for refusal in record.refusals if refusal.content_id == given.content_id]
        if refusals:
            yield Settled(given, Outcome.REFUSED, refusals[0].reason)
        elif now - given.given_at > NO_EFFECT_S_MAX:
            yield Settled(given, Outcome.LOST, "the worker did not begin")
