"""The metrics page of a gateway: totals of all processes -> text 0.0.4 or OpenMetrics.

A series whose values did not change since the last page keeps its lines: a page costs what is in use. The lines are
prometheus_client's own, made for one series at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from millstream.services.metrics.catalogue import CATALOGUE, Metric
from millstream.services.metrics.exposition import Rows, family, rows_of, shape_of
from millstream.services.metrics.merge import Totals
from millstream.services.metrics.registry import MetricsRegistry

_EOF = b"# EOF\n"
#: Forms of the page that are remembered: Prometheus' own, and one more. A client may ask for any version of OpenMetrics.
_FORMS_MAX = 2
#: After so many new lines the thread rests for a moment: the event loop gets the interpreter before its switch interval.
_LINES_OF_A_TURN = 100
_REST_S = 0.0005

Encode = Callable[[Collector], bytes]


class GaugeSample(NamedTuple):
    """A gauge of the moment of a page, which no process keeps."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


class MetricsPage:
    """Renders the page over `registry`. For one thread at a time."""

    def __init__(self, registry: MetricsRegistry, catalogue: Sequence[Metric] = CATALOGUE) -> None:
        self._registry = registry
        self._catalogue = catalogue
        self._forms: dict[str, _Form] = {}  # by content type

    def render(
        self,
        accept: str | None,
        beside: Callable[[Totals, bool], str] = lambda *_: "",
        moment: Iterable[GaugeSample] = (),
    ) -> tuple[bytes, str]:
        """The body and content type of a scrape. Reads files: call it off the event loop.

        Args:
            accept: the scrape's Accept header.
            beside: lines of other names, from the same totals; whether they are to be OpenMetrics.
            moment: gauges of this page alone.
        """
        encode, content_type = choose_encoder(accept or "")
        totals = self._registry.totals()
        rows = rows_of(totals)
        for sample in moment:
            rows.setdefault(shape_of(sample.metric), []).append((sample.labels, [sample.value]))
        form = self._form(content_type, encode)
        parts = [part for metric in self._catalogue for part in form.lines(metric, rows.get(shape_of(metric), []))]
        openmetrics = content_type.startswith("application/openmetrics-text")
        if self._registry.directory is None:  # of this process alone: with the figures of the operating system
            parts.append(encode(_process()).removesuffix(_EOF))
        parts.append(beside(totals, openmetrics).encode())
        if openmetrics:
            parts.append(_EOF)
        return b"".join(parts), content_type

    def _form(self, content_type: str, encode: Encode) -> _Form:
        form = self._forms.get(content_type)
        if form is None:
            while len(self._forms) >= _FORMS_MAX:
                del self._forms[next(iter(self._forms))]
            form = self._forms[content_type] = _Form(encode)
        return form


class _Form:
    """The lines of all series in one form of text, as they were on the last page."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._lines: dict[str, dict[tuple[str, ...], tuple[list[float], bytes]]] = {}  # by metric and label values
        self._orders: dict[str, tuple[list[tuple[str, ...]], list[tuple[str, ...]]]] = {}  # as found, as shown
        self._heads: dict[str, bytes] = {}
        self._made = 0

    def lines(self, metric: Metric, rows: Rows) -> Iterator[bytes]:
        """HELP, TYPE and the lines of each series; nothing for a metric without series."""
        if not rows:
            self._lines.pop(metric.name, None)
            return
        before = self._lines.get(metric.name, {})
        now: dict[tuple[str, ...], tuple[list[float], bytes]] = {}
        for labels, values in rows:
            known = before.get(labels)
            now[labels] = (
                known if known is not None and known[0] == values else (values, self._text(metric, labels, values))
            )
        self._lines[metric.name] = now
        yield self._heads[metric.name]
        for labels in self._order(metric, list(now)):
            yield now[labels][1]

    def _order(self, metric: Metric, found: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """By label values, on every page alike; the last page's order where the same series are there."""
        known = self._orders.get(metric.name)
        if known is None or known[0] != found:
            known = self._orders[metric.name] = (found, sorted(found))
        return known[1]

    def _text(self, metric: Metric, labels: tuple[str, ...], values: list[float]) -> bytes:
        self._made += 1
        if self._made % _LINES_OF_A_TURN == 0:
            time.sleep(_REST_S)
        text = self._encode(_One(family(metric, [(labels, values)]))).removesuffix(_EOF)
        lines = text.splitlines(keepends=True)
        heads = [line for line in lines if line.startswith(b"# ")]
        self._heads[metric.name] = b"".join(heads)
        return b"".join(lines[len(heads) :])


def _process() -> CollectorRegistry:
    collectors = CollectorRegistry()
    ProcessCollector(registry=collectors)
    return collectors


class _One(Collector):
    """A collector of one family."""

    def __init__(self, one: Family) -> None:
        self._one = one

    def collect(self) -> Iterable[Family]:
        return (self._one,)
