"""Totals -> families of prometheus_client, which `millstream.services.metrics.page` renders as text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from millstream.services.allowed_hosts import AllowedHosts
from millstream.services.metrics.catalogue import CATALOGUE, Kind, Metric
from millstream.services.metrics.merge import Totals
from millstream.services.metrics.registry import MetricsRegistry

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

Rows = list[tuple[tuple[str, ...], list[float]]]
Shape = tuple[str, str, int, int]


class RegistryCollector(Collector):
    """Collects the merged series of a registry as families; series that are not in the catalogue are left out."""

    def __init__(self, registry: MetricsRegistry, catalogue: Sequence[Metric] = CATALOGUE) -> None:
        self._registry = registry
        self._catalogue = catalogue

    def describe(self) -> Iterable[Family]:
        """Return nothing, so that registering reads no files."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Read the files and yield every family that has a series."""
        totals, _ = self._registry.page_totals()
        rows = rows_of(totals)
        for metric in self._catalogue:
            mine = rows.get(shape_of(metric))
            if mine:
                yield family(metric, sorted(mine))


def prometheus_registry(registry: MetricsRegistry) -> CollectorRegistry:
    """Return a prometheus_client registry over `registry`.

    It includes the process metrics (CPU, memory, descriptors) only if `registry` is of this process alone: for several
    processes they would be those of the process that happens to answer.
    """
    collectors = CollectorRegistry()
    collectors.register(RegistryCollector(registry))
    if registry.directory is None:
        ProcessCollector(registry=collectors)
    return collectors


def serve(
    port: int,
    registry: MetricsRegistry,
    hosts: AllowedHosts,
    host: str = "0.0.0.0",  # noqa: S104
    ready: Callable[[], bool] = lambda: True,
) -> tuple[WSGIServer, threading.Thread]:
    """Serve scrapes from a thread of this process; stop it with `shutdown` and `server_close`. Raises OSError.

    `/live` answers 200 while threads of this process run, and `/ready` 200 or 503, for probes.

    Args:
        port: to listen on.
        registry: whose series are served.
        hosts: the names by which scrapers may call: a web page that rebinds its name to this machine has another one.
        host: the address to listen on.
        ready: returns whether this process does what it is for.
    """
    server, thread = start_http_server(port, addr=host, registry=prometheus_registry(registry))
    server.set_app(_for_hosts(hosts, _with_health(ready, cast("WSGIApplication", server.get_app()))))
    return server, thread


def _with_health(ready: Callable[[], bool], app: WSGIApplication) -> WSGIApplication:
    """Return `app`, with the paths that probes ask."""

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path not in {"/live", "/ready"}:
            return app(environ, start_response)
        good = path == "/live" or ready()
        start_response("200 OK" if good else "503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"yes\n" if good else b"not yet\n"]

    return answer


def _for_hosts(hosts: AllowedHosts, app: WSGIApplication) -> WSGIApplication:
    """Return `app`, which answers 403 to requests for other hosts."""

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if hosts.allow(environ.get("HTTP_HOST", "").encode("latin-1")):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"this Host is not known as a name of this machine: name it in MILLSTREAM_ALLOWED_HOSTS\n"]

    return answer


def shape_of(metric: Metric) -> Shape:
    """Return what all series of a metric have in common; an earlier release may have used its name differently."""
    return metric.kind, metric.name, len(metric.labels), metric.slots


def rows_of(totals: Totals) -> dict[Shape, Rows]:
    """Return label values and values of all series, grouped by shape."""
    rows: dict[Shape, Rows] = {}
    for key, values in totals.items():
        rows.setdefault((key.kind, key.name, len(key.labels), key.slots), []).append((key.labels, values))
    return rows


def family(metric: Metric, rows: Rows) -> Family:
    """Return the series of a metric as a family of prometheus_client."""
    if metric.kind is Kind.COUNTER:
        counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, values in rows:
            counter.add_metric(labels, values[0])
        return counter
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
        for labels, values in rows:
            histogram.add_metric(labels, list(zip(bounds, accumulate(values[:-1]), strict=True)), values[-1])
        return histogram
    gauge = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, values in rows:
        gauge.add_metric(labels, values[0])
    return gauge
