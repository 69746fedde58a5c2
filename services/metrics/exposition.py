"""The metrics as Prometheus reads them: totals -> prometheus_client families -> text 0.0.4 or OpenMetrics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.metrics.catalogue import CATALOGUE, Kind, Metric
from services.metrics.tally import Tally
from services.metrics.totals import Totals

_EOF = b"# EOF\n"
_Rows = list[tuple[tuple[str, ...], list[float]]]


class TallyCollector(Collector):
    """The merged series of a tally, as families of the catalogue; series that it does not know are left out."""

    def __init__(self, tally: Tally, catalogue: Sequence[Metric] = CATALOGUE) -> None:
        self._tally = tally
        self._catalogue = catalogue
        self.totals = Totals()  # as they were read last

    def describe(self) -> Iterable[Family]:
        """Nothing, so that registering reads no files."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Read the files and yield every family that has a series."""
        rows: dict[tuple[str, str, int, int], _Rows] = {}
        self.totals = self._tally.totals()
        for key, values in self.totals.items():
            rows.setdefault((key.kind, key.name, len(key.labels), key.slots), []).append((key.labels, values))
        for metric in self._catalogue:
            mine = rows.get((metric.kind, metric.name, len(metric.labels), metric.slots))
            if mine:
                yield _family(metric, sorted(mine))


def registry(tally: Tally) -> CollectorRegistry:
    """A registry over `tally`, with the figures of the operating system when it is of this process alone.

    Of several processes prometheus_client could only show whichever answers, so they are left out then.
    """
    return _registry(tally, TallyCollector(tally))


def _registry(tally: Tally, collector: TallyCollector) -> CollectorRegistry:
    collectors = CollectorRegistry()
    collectors.register(collector)
    if tally.directory is None:
        ProcessCollector(registry=collectors)
    return collectors


def render(
    tally: Tally, accept: str | None, beside: Callable[[Totals, bool], str] = lambda *_: ""
) -> tuple[bytes, str]:
    """The body and content type of a scrape with this Accept header. Reads files: call it off the event loop.

    `beside`: lines of other names, from the same totals; whether they are to be OpenMetrics.
    """
    encode, content_type = choose_encoder(accept or "")
    collector = TallyCollector(tally)
    body = encode(_registry(tally, collector))
    openmetrics = content_type.startswith("application/openmetrics-text")
    lines = beside(collector.totals, openmetrics).encode()
    return (body.removesuffix(_EOF) + lines + _EOF if openmetrics else body + lines), content_type


def serve(port: int, tally: Tally, host: str = "0.0.0.0") -> tuple[WSGIServer, threading.Thread]:  # noqa: S104
    """Answer scrapes from a thread of this process. Stop it with `shutdown` and `server_close`. Raises OSError."""
    return start_http_server(port, addr=host, registry=registry(tally))


def _family(metric: Metric, rows: _Rows) -> Family:
    if metric.kind is Kind.COUNTER:
        counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, values in rows:
            counter.add_metric(labels, values[0])
        return counter
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
        for labels, values in rows:
            buckets = zip(bounds, accumulate(values[:-1]), strict=True)
            histogram.add_metric(labels, list(buckets), values[-1])
        return histogram
    gauge = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, values in rows:
        gauge.add_metric(labels, values[0])
    return gauge
