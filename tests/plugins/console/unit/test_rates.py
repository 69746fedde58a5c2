"""What the console computes from two readings of a server's counts."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from pathlib import Path

import pytest

from millstream.plugins.console.gateway.rates import WANTED, Counts, Growth, Reading, endpoints, totals
from millstream.services.metrics import catalogue
from millstream.services.metrics.files import ReadCache
from millstream.services.metrics.registry import MetricsRegistry, quantile

LANE = ("m", "1", "cpu")


def served(registry: MetricsRegistry, requests: int, *, failed: int = 0, seconds: float = 0.001) -> None:
    registry.counter(catalogue.REQUESTS, "m", "1", "v2", "ok").add(requests)
    registry.counter(catalogue.REQUESTS, "m", "1", "grpc", "overloaded").add(failed)
    registry.counter(catalogue.REQUESTS, "m", "1", "grpc", "invalid").add(2 * failed)
    registry.histogram(catalogue.REQUEST_DURATION, *LANE, "v2").observe(seconds, requests)
    registry.histogram(catalogue.BATCH_ROWS, *LANE).observe(4, requests // 4)
    registry.counter(catalogue.REQUESTS_REFUSED, "lane_full").add(failed)
    registry.counter(catalogue.WORKER_BUSY_SECONDS, "cpu", "cpu-0").add(requests / 400)


def reading(at_s: float, *registries: MetricsRegistry, exists: Collection[str] = ("m",)) -> Reading:
    """What is read of processes for the first time."""
    parts = {
        (number, where): part for number, one in enumerate(registries) for where, part in one.parts(ReadCache()).items()
    }
    return Counts().read(at_s, parts, exists)


def test_rates_quantiles_and_shares_are_those_of_the_interval() -> None:
    registry = MetricsRegistry(None, "gateway-0")
    served(registry, 1000, failed=1, seconds=1.0)
    before = reading(10.0, registry)
    served(registry, 400, failed=2)
    registry.gauge(catalogue.LANE_ROWS, *LANE).set(7)
    growth = Growth(before, reading(12.0, registry))
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
    [one] = endpoints(Growth(None, reading(1.0, registry)))
    assert (one["requests_per_s"], one["p99_s"], one["instances"]) == (None, None, 1)


def test_counters_that_fell_or_stayed_grew_by_nothing() -> None:
    many, few = (MetricsRegistry(None, "gateway-0") for _ in range(2))
    served(many, 1000, failed=5)
    served(few, 8)
    for registry in (many, few):
        registry.gauge(catalogue.INSTANCES_READY, *LANE).set(1)
    for after in (few, many):
        growth = Growth(reading(1.0, many), reading(2.0, after))
        [one] = endpoints(growth)
        assert (one["requests_per_s"], one["failed_per_s"], one["p50_s"]) == (0, 0, None)
        assert growth.busy("cpu", "cpu-0") == 0


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ([], 0.5, None),
        ([0, 0, 0], 0.5, None),
        ([4, 0], 0.5, None),
        ([4, 0, 0], 0.5, 0.5),
        ([0, 4, 0], 0.5, 1.5),
        ([0, 0, 4], 0.5, 2.0),
    ],
)
def test_quantiles_are_those_of_prometheus(counts: list[float], share: float, value: float | None) -> None:
    assert quantile(counts, share, (1.0, 2.0, inf)) == value


def test_only_what_changed_is_added_up_again_and_gives_the_same(tmp_path: Path) -> None:
    """Readings one after the other are those of a first look."""
    gateways = [MetricsRegistry(tmp_path, f"gateway-{number}") for number in range(2)]
    looks, cache = Counts(), ReadCache(WANTED)

    def look(at_s: float, exists: Collection[str] = ("m", "quiet")) -> Reading:
        found = looks.read(at_s, gateways[0].parts(cache), exists)
        assert found == Counts().read(at_s, gateways[0].parts(ReadCache()), exists)
        return found

    for gateway in gateways:
        served(gateway, 8)
        gateway.counter(catalogue.REQUESTS, "quiet", "1", "v2", "ok").add(3)
        gateway.gauge(catalogue.INSTANCES_READY, *LANE).set(2)
        gateway.gauge(catalogue.LANE_ROWS, *LANE).set(5)
    first = look(1.0)
    assert first.instances() == {("m", "1"): 2}, "both see the same instances"
    assert first.of(catalogue.LANE_ROWS) == {("m", "1"): (10,)}, "each has rows of its own"
    assert first.of(catalogue.REQUESTS)["quiet", "1"] == (6, 0, 0)

    served(gateways[1], 4, failed=1)
    second = look(2.0)
    assert Growth(first, second).all(catalogue.REQUESTS) == {("m", "1"): [7, 1, 2]}

    gateways[1].close()  # its counts stay, its gauges end
    third = look(3.0)
    assert third.of(catalogue.REQUESTS) == second.of(catalogue.REQUESTS)
    assert third.of(catalogue.LANE_ROWS) == {("m", "1"): (5,)}
    gateways[1] = MetricsRegistry(tmp_path, "gateway-1")  # retires the file of the one that ended
    assert look(4.0).of(catalogue.REQUESTS) == second.of(catalogue.REQUESTS)
    assert look(5.0, exists=("m",)).of(catalogue.REQUESTS).keys() == {("m", "1")}

    gateways[0].remove(catalogue.LANE_ROWS, *LANE)
    gateways[0].gauge(catalogue.LANE_ROWS, "n", "1", "cpu").set(9)  # in the memory of the one before
    assert look(6.0, exists=("m", "n")).of(catalogue.LANE_ROWS) == {("n", "1"): (9,)}
    for gateway in gateways:
        gateway.close()
