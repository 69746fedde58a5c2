"""scale_metrics: the series about the size of each pool. Only the leader has them."""

from __future__ import annotations

from collections.abc import Iterable

from millstream.plugins.fleet.controller.autoscale.decision import Reason
from millstream.plugins.fleet.scaling import ScaleDecision
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry


class ScaleMetrics:
    """The series of one controller."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._registry = registry
        self._pools: frozenset[str] = frozenset()

    def decided(self, decisions: Iterable[ScaleDecision]) -> None:
        """Show the decisions of a round; remove the series of pools that are gone."""
        shown: set[str] = set()
        for one in decisions:
            shown.add(one.pool)
            if (
                one.reason != Reason.UNBOUNDED
            ):  # else scalers would take what runs for an order, and alerts a 0 for none
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
