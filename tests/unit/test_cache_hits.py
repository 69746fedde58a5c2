"""Which requests count as hits and misses of the model cache, and that pages never show fewer hits than before."""

from __future__ import annotations

from millstream.gateway.scheduling.lane_metrics import LaneMetrics
from millstream.services.errors import Code
from millstream.services.metrics import catalogue
from millstream.services.metrics.catalogue import RequestProtocol
from millstream.services.metrics.page import MetricsPage
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.model.signature import Signature
from millstream.services.wire.batch import ReplyHeader
from tests.kit.metrics import Page

MANIFEST = Manifest(
    model="m", version=1, created=0.0, digest="0" * 64, served="m", files=(),
    signature=Signature(inputs=(), outputs=(), batching=True), config=ModelConfig(), opset=17, ir_version=8,
)  # fmt: skip


class Lane:
    """The metrics of one version's lane, and the page that shows them."""

    def __init__(self) -> None:
        self.registry = MetricsRegistry(None, "gateway")
        self.metrics = LaneMetrics(self.registry, MANIFEST, "cpu")
        self._page = MetricsPage(self.registry)

    def answer(self, count: int) -> None:
        header = ReplyHeader("b", "w", 0.0, 0.0, 0.0, 0.0, count, [count], {}, [], "")
        self.metrics.answered(RequestProtocol.V2, [0.01] * count, count, header, 0.01)

    def shown(self) -> tuple[float, float]:
        """Hits and misses on the page."""
        page = Page(self._page.render(None)[0].decode())
        return page.value(catalogue.CACHE_HITS.name), page.value(catalogue.CACHE_MISSES.name)


def test_requests_of_a_loaded_model_are_hits_whatever_their_answer() -> None:
    lane = Lane()
    lane.answer(3)
    lane.metrics.failed(RequestProtocol.V2, Code.EXPIRED, 1.0)
    assert lane.shown() == (4, 0)


def test_requests_that_waited_for_a_load_are_misses_once_they_are_answered() -> None:
    lane = Lane()
    lane.metrics.loaded([0.5, 0.4, 0.3])
    assert lane.shown() == (0, 0)
    lane.answer(2)
    lane.metrics.failed(RequestProtocol.V2, Code.CANCELLED, 1.0)
    lane.answer(2)
    assert lane.shown() == (2, 3)


def test_requests_that_are_refused_while_the_model_is_not_loaded_are_misses() -> None:
    lane = Lane()
    lane.metrics.unloaded = True
    lane.metrics.record_rejection(RequestProtocol.V2, Code.OVERLOADED)
    lane.metrics.unloaded = False
    lane.answer(1)
    assert lane.shown() == (1, 1)


def test_hits_never_fall_from_one_page_to_the_next() -> None:
    lane = Lane()
    lane.answer(2)
    assert lane.shown() == (2, 0)
    # The file of the misses is read, that of the answers was a moment before.
    lane.registry.counter(catalogue.CACHE_MISSES, MANIFEST.model, str(MANIFEST.version)).add()
    assert lane.shown() == (2, 1)
    lane.answer(1)
    assert lane.shown() == (2, 1)
    lane.answer(1)
    assert lane.shown() == (3, 1)


def test_models_without_series_of_their_own_share_their_hits() -> None:
    registry = MetricsRegistry(None, "gateway", models_max=1)
    page = MetricsPage(registry)
    for name, answered in (("busy", 5), ("rare", 2), ("cold", 1)):
        registry.counter(catalogue.REQUESTS, name, "1", RequestProtocol.V2, "ok").add(answered)
    registry.counter(catalogue.CACHE_MISSES, "cold", "1").add()
    shown = Page(page.render(None)[0].decode())
    assert shown.value(catalogue.CACHE_HITS.name, model="busy") == 5
    assert shown.value(catalogue.CACHE_HITS.name, model="other") == 2
    assert shown.value(catalogue.CACHE_MISSES.name, model="other") == 1
    assert shown.value(catalogue.CACHE_HITS.name) == 7
