"""The series of a controller, and those about the size of each pool."""

from __future__ import annotations

from collections.abc import Iterable

from millstream.plugins.fleet.controller.autoscale.decision import Reason
from millstream.plugins.fleet.controller.in_flight import Outcome
from millstream.plugins.fleet.controller.survey import Findings
from millstream.plugins.fleet.scaling import ScaleDecision
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.wire.orders import OrderReason


class ControllerMetrics:
    """Series of one controller. Only the leader's say something about instances."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._registry = registry
        self._leads = registry.gauge(catalogue.CONTROLLER_LEADS)
        self._running = registry.gauge(catalogue.CONTROLLER_INSTANCES, "ready")
        self._wanted = registry.gauge(catalogue.CONTROLLER_INSTANCES, "wanted")
        self._missing = registry.gauge(catalogue.CONTROLLER_INSTANCES, "missing")
        self._in_flight = registry.gauge(catalogue.CONTROLLER_ORDERS_IN_FLIGHT)
        self._rounds = registry.histogram(catalogue.CONTROLLER_ROUND_DURATION)
        self.not_leading()

    def not_leading(self) -> None:
        """Record that another controller leads, or none."""
        for gauge in (self._leads, self._running, self._wanted, self._missing, self._in_flight):
            gauge.set(0)

    def found(self, found: Findings) -> None:
        """Record what this round found."""
        self._leads.set(1)
        self._running.set(found.instances_ready)
        self._wanted.set(found.instances_wanted)
        self._missing.set(found.instances_missing)

    def round(self, seconds: float) -> None:
        """Record the time of a round."""
        self._rounds.observe(seconds)

    def in_flight(self, orders: int) -> None:
        """Record the orders that are not carried out yet."""
        self._in_flight.set(orders)

    def ordered(self, do: str, reason: OrderReason) -> None:
        """Count an order."""
        self._registry.counter(catalogue.CONTROLLER_ORDERS, do, reason.value).add()

    def settled(self, do: str, outcome: Outcome) -> None:
        """Count what became of an order."""
        self._registry.counter(catalogue.CONTROLLER_OUTCOMES, do, outcome.value).add()


class ScaleMetrics:
    """The series about pools, which only the leader has."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._registry = registry
        self._pools: frozenset[str] = frozenset()

    def decided(self, decisions: Iterable[ScaleDecision]) -> None:
        """Show the decisions of a round; remove the series of pools that are gone."""
        shown: set[str] = set()
        for one in decisions:
            shown.add(one.pool)
            # Of an unbounded pool, scalers would take what runs for an order, and alerts a 0 for none.
            if one.reason != Reason.UNBOUNDED:
                self._registry.gauge(catalogue.WORKERS_WANTED, one.pool).set(one.wanted)
            for metric, value in (
                (catalogue.WORKERS_READY, one.ready),
                (catalogue.POOL_QUEUE_ROWS, one.queue_rows),
                (catalogue.POOL_OLDEST_WAIT, one.oldest_wait_s),
                (catalogue.POOL_ARRIVALS, one.arrival_rows_per_s),
                (catalogue.POOL_CAPACITY, one.capacity_rows_per_s),
                (catalogue.POOL_UTILISATION, one.utilisation),
            ):
                self._registry.gauge(metric, one.pool).set(value)
        self._remove(self._pools - shown)
        self._pools = frozenset(shown)

    def not_leading(self) -> None:
        """Remove all series: another controller has them."""
        self._remove(self._pools)
        self._pools = frozenset()

    def _remove(self, pools: Iterable[str]) -> None:
        for pool in pools:
            for metric in catalogue.POOL_SCALE:
                self._registry.remove(metric, pool)
