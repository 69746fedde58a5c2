"""The metrics page: totals of all processes -> text format 0.0.4 or OpenMetrics; `serve` has it on a port of its own.

The lines of a series are rendered again only if its values changed since the last page, so the cost depends on the
series in use. prometheus_client renders them, one series at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from millstream.services.allowed_hosts import AllowedHosts
from millstream.services.metrics.catalogue import CACHE_HITS, CACHE_MISSES, CATALOGUE, REQUESTS, Kind, Metric
from millstream.services.metrics.label_limit import Exists, all_exist, other_labels
from millstream.services.metrics.record import Totals
from millstream.services.metrics.registry import MetricsRegistry

_EOF = b"# EOF\n"
#: Cached formats of the page: Prometheus' own, and one more. A client may ask for any version of OpenMetrics.
_FORMATS_MAX = 2
#: After rendering this many series the thread sleeps, so that the event loop gets the interpreter before the switch
#: interval.
_SERIES_PER_TURN = 100
_PAUSE_S = 0.0005

Encode = Callable[[Collector], bytes]
Rows = list[tuple[tuple[str, ...], list[float]]]
Shape = tuple[str, str, int, int]


_Version = tuple[str, ...]  # model, version


class CacheHits:
    """Computes hits for the pages of one process. Not thread-safe."""

    def __init__(self) -> None:
        self._shown: dict[_Version, float] = {}

    def rows(self, rows: Mapping[Shape, Rows]) -> Rows:
        """Return the hits of each version on a page with these rows."""
        hits: dict[_Version, float] = {}
        for labels, (count,) in rows.get(shape_of(REQUESTS), ()):
            hits[labels[:2]] = hits.get(labels[:2], 0.0) + count
        for labels, (count,) in rows.get(shape_of(CACHE_MISSES), ()):
            hits[labels] = hits.get(labels, 0.0) - count
        self._shown = {version: max(0.0, count, self._shown.get(version, 0.0)) for version, count in hits.items()}
        return [(version, [count]) for version, count in self._shown.items()]


class GaugeSample(NamedTuple):
    """A gauge that is computed for one page and stored in no process."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


class MetricsPage:
    """Renders the page of `registry`. Not thread-safe."""

    def __init__(self, registry: MetricsRegistry, catalogue: Sequence[Metric] = CATALOGUE) -> None:
        self._registry = registry
        self._catalogue = catalogue
        self._formats: dict[str, _Format] = {}  # by content type
        self._cache_hits = CacheHits()

    def render(
        self,
        accept: str | None,
        extra_lines: Callable[[Totals, bool], str] = lambda *_: "",
        extra_gauges: Iterable[GaugeSample] = (),
        exists: Exists = all_exist,
    ) -> tuple[bytes, str]:
        """Return body and content type for a scrape. Reads files: must be called off the event loop.

        Args:
            accept: the Accept header.
            extra_lines: returns further lines for these totals; its second argument says whether the format is
                OpenMetrics.
            extra_gauges: gauges of this page only.
            exists: says whether a version exists; others have no series.
        """
        encode, content_type = choose_encoder(accept or "")
        totals, shown = self._registry.page_totals(exists)
        rows = rows_of(totals)
        for labels, shape, value in _bounded(extra_gauges, shown):
            rows.setdefault(shape, []).append((labels, [value]))
        rows[shape_of(CACHE_HITS)] = self._cache_hits.rows(rows)
        cached = self._format(content_type, encode)
        openmetrics = content_type.startswith("application/openmetrics-text")
        parts = [part for metric in self._catalogue for part in cached.lines(metric, rows.get(shape_of(metric), []))]
        if self._registry.directory is None:  # of this process alone: with its process metrics
            parts.append(encode(_process()).removesuffix(_EOF))
        parts.append(extra_lines(totals, openmetrics).encode())
        if openmetrics:
            parts.append(_EOF)
        return b"".join(parts), content_type

    def _format(self, content_type: str, encode: Encode) -> _Format:
        cached = self._formats.get(content_type)
        if cached is None:
            while len(self._formats) >= _FORMATS_MAX:
                del self._formats[next(iter(self._formats))]
            cached = self._formats[content_type] = _Format(encode)
        return cached


class _Lines(NamedTuple):
    """The lines of a series, and what they were rendered from."""

    values: list[float]
    text: bytes


class _Format:
    """The lines of all series of the last page, in one text format."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._lines: dict[str, dict[tuple[str, ...], _Lines]] = {}  # by metric and label values
        self._orders: dict[str, tuple[list[tuple[str, ...]], list[tuple[str, ...]]]] = {}  # unsorted, sorted
        self._heads: dict[str, bytes] = {}
        self._rendered = 0  # series, so far

    def lines(self, metric: Metric, rows: Rows) -> Iterator[bytes]:
        """Yield HELP, TYPE and the lines of each series; nothing for a metric without series."""
        if not rows:
            self._lines.pop(metric.name, None)
            return
        before = self._lines.get(metric.name, {})
        now: dict[tuple[str, ...], _Lines] = {}
        for labels, values in rows:
            known = before.get(labels)
            if known is None or known.values != values:
                known = _Lines(values, self._text(metric, labels, values))
            now[labels] = known
        self._lines[metric.name] = now
        yield self._heads[metric.name]
        for labels in self._order(metric, list(now)):
            yield now[labels].text

    def _order(self, metric: Metric, unsorted: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Sort by label values; the order of the last page is reused if it had the same series."""
        known = self._orders.get(metric.name)
        if known is None or known[0] != unsorted:
            known = self._orders[metric.name] = (unsorted, sorted(unsorted))
        return known[1]

    def _text(self, metric: Metric, labels: tuple[str, ...], values: list[float]) -> bytes:
        self._rendered += 1
        if self._rendered % _SERIES_PER_TURN == 0:
            time.sleep(_PAUSE_S)
        text = self._encode(_SingleFamily(family(metric, [(labels, values)]))).removesuffix(_EOF)
        lines = text.splitlines(keepends=True)
        heads = [line for line in lines if line.startswith(b"# ")]
        self._heads[metric.name] = b"".join(heads)
        return b"".join(lines[len(heads) :])


def _bounded(
    samples: Iterable[GaugeSample], shown: frozenset[str] | None
) -> Iterator[tuple[tuple[str, ...], Shape, float]]:
    """Yield labels, shape and value of gauges; those of models without series of their own are summed."""
    others: dict[tuple[tuple[str, ...], Shape], float] = {}
    for metric, labels, value in samples:
        if shown is None or metric.labels[:1] != ("model",) or labels[0] in shown:
            yield labels, shape_of(metric), value
        else:
            other = other_labels(metric.name, labels), shape_of(metric)
            others[other] = others.get(other, 0.0) + value
    for (labels, shape), value in others.items():
        yield labels, shape, value


def _process() -> CollectorRegistry:
    collectors = CollectorRegistry()
    ProcessCollector(registry=collectors)
    return collectors


class _SingleFamily(Collector):
    """A collector of one family."""

    def __init__(self, collected: Family) -> None:
        self._collected = collected

    def collect(self) -> Iterable[Family]:
        return (self._collected,)


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
    page, rendering = MetricsPage(registry), threading.Lock()

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path, status, content_type = environ.get("PATH_INFO"), "200 OK", "text/plain; charset=utf-8"
        if not hosts.allow(environ.get("HTTP_HOST", "").encode("latin-1")):
            status = "403 Forbidden"
            body = b"this Host is not known as a name of this machine: name it in MILLSTREAM_ALLOWED_HOSTS\n"
        elif path == "/live" or (path == "/ready" and ready()):
            body = b"yes\n"
        elif path == "/ready":
            status, body = "503 Service Unavailable", b"not yet\n"
        else:
            with rendering:
                body, content_type = page.render(environ.get("HTTP_ACCEPT"))
        start_response(status, [("Content-Type", content_type)])
        return [body]

    server, thread = start_http_server(port, addr=host, registry=CollectorRegistry())
    server.set_app(answer)
    return server, thread
