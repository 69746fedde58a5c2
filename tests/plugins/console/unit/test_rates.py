"""What the console computes from two readings of a server's counts."""

from __future__ import annotations

from math import inf

import pytest

from millstream.plugins.console.gateway.rates import Growth, endpoints, quantile, reading_of, totals
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry

LANE = ("m", "1", "cpu")


def served(registry: MetricsRegistry, requests: int, *, failed: int = 0, seconds: float = 0.001) -> None:
    registry.counter(catalogue.REQUESTS, "m", "1", "v2", "ok").add(requests)
    registry.counter(catalogue.REQUESTS, "m", "1", "grpc", "overloaded").add(failed)
    registry.counter(catalogue.REQUESTS, "m", "1", "grpc", "invalid").add(2 * failed)
    registry.histogram(catalogue.REQUEST_DURATION, *LANE, "v2").observe(seconds, requests)
    registry.histogram(catalogue.BATCH_ROWS, *LANE).observe(4, requests // 4)
    registry.counter(catalogue.REQUESTS_REFUSED, "lane_full").add(failed)
    registry.counter(catalogue.WORKER_BUSY_SECONDS, "cpu", "cpu-0").add(requests / 400)


def test_rates_quantiles_and_shares_are_those_of_the_interval() -> None:
    registry = MetricsRegistry(None, "gateway-0")
    served(registry, 1000, failed=1, seconds=1.0)
    before = reading_of(10.0, registry.totals())
    served(registry, 400, failed=2)
    registry.gauge(catalogue.LANE_ROWS, *LANE).set(7)
    growth = Growth(before, reading_of(12.0, registry.totals()))
    [one] = endpoints(growth)
    assert (one["requests_per_s"], one["failed_per_s"], one["invalid_per_s"]) == (203, 1, 2)
    assert 0.0005 < one["p50_s"] < one["p99_s"] <= 0.001
    assert (one["batch_rows"], one["queue_rows"]) == (4, 7)
    assert (totals(growth)["requests_per_s"], totals(growth)["refused_per_s"]) == (203, 1)
    assert totals(growth)["p99_s"] == one["p99_s"]
    assert growth.busy("cpu", "cpu-0") == 0.5
    assert growth.busy("cpu", "elsewhere") is None


def test_of_a_first_reading_only_the_present_is_known() -> None:
    registry = MetricsRegistry(None, "gateway-0")
    served(registry, 1000)
    registry.gauge(catalogue.INSTANCES_READY, *LANE).set(1)
    [one] = endpoints(Growth(None, reading_of(1.0, registry.totals())))
    assert (one["requests_per_s"], one["p99_s"], one["instances"]) == (None, None, 1)


def test_counters_that_fell_or_stayed_grew_by_nothing() -> None:
    many, few = (MetricsRegistry(None, "gateway-0") for _ in range(2))
    served(many, 1000, failed=5)
    served(few, 8)
    for registry in (many, few):
        registry.gauge(catalogue.INSTANCES_READY, *LANE).set(1)
    for after in (few, many):
        growth = Growth(reading_of(1.0, many.totals()), reading_of(2.0, after.totals()))
        [one] = endpoints(growth)
        assert (one["requests_per_s"], one["failed_per_s"], one["p50_s"]) == (0, 0, None)
        assert growth.busy("cpu", "cpu-0") == 0


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [([], 0.5, None), ([0, 0, 0], 0.5, None), ([4, 0, 0], 0.5, 0.5), ([0, 4, 0], 0.5, 1.5), ([0, 0, 4], 0.5, 2.0)],
)
def test_quantiles_are_those_of_prometheus(counts: list[float], share: float, value: float | None) -> None:
    assert quantile(counts, share, (1.0, 2.0, inf)) == value
