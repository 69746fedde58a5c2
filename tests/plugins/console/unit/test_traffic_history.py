"""The history of the last hour: what is kept of many models, and who sees what of it."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.plugins.console.gateway.rates import Counts, Growth
from millstream.plugins.console.gateway.traffic_history import ENTRIES_MAX, MODELS_MAX, SERIES, TrafficHistory
from millstream.services.metrics import catalogue as c
from millstream.services.metrics.files import ReadCache
from millstream.services.metrics.registry import MetricsRegistry
from tests.kit.catalog import worker


class Scene:
    """A gateway whose console keeps a history, 10 s between two entries."""

    def __init__(self) -> None:
        self.registry = MetricsRegistry(None, "gateway-0")
        self.history = TrafficHistory()
        self._counts = Counts()
        self._models = {f"m{number}" for number in range(100)}
        self.at_s = 1000.0
        self._before = self._counts.read(self.at_s, self.registry.parts(ReadCache()), self._models)

    def enter(self, requests: Mapping[str, int], *, seconds: float = 0.001, version: str = "1") -> None:
        """Let models be called, and add an entry."""
        for model, count in requests.items():
            self.registry.counter(c.REQUESTS, model, version, "v2", "ok").add(count)
            self.registry.histogram(c.REQUEST_DURATION, model, version, "cpu", "v2").observe(seconds, count)
        self.at_s += 10
        now = self._counts.read(self.at_s, self.registry.parts(ReadCache()), self._models)
        self.history.enter(Growth(self._before, now), (worker(),))
        self._before = now


def test_series_of_all_and_of_a_model() -> None:
    scene = Scene()
    scene.registry.counter(c.WORKER_BUSY_SECONDS, "cpu", "cpu").add(2)  # the worker `cpu-1`
    scene.enter({"m1": 20, "m2": 10})
    scene.registry.gauge(c.LANE_ROWS, "m2", "1", "cpu").set(7)
    scene.registry.counter(c.WORKER_BUSY_SECONDS, "cpu", "cpu").add(5)
    scene.enter({"m1": 40})
    whole = scene.history.document(500.0, None, None)
    assert whole.keys() == {"step_s", "at", *SERIES}
    assert whole["at"] == [1510, 1520]
    assert (whole["requests_per_s"], whole["failed_per_s"], whole["queue_rows"]) == ([3, 4], [0, 0], [0, 7])
    assert whole["busy"] == [0.2, 0.5]
    one = scene.history.document(0.0, "m2", None)
    assert (one["requests_per_s"], one["queue_rows"]) == ([1, 0], [0, 7])
    assert one["p50_s"][0] <= 0.001
    assert one["p50_s"][1] is None
    assert scene.history.document(0.0, "m3", None)["requests_per_s"] == [0, 0], "it was not called"
    seen = scene.history.document(0.0, None, {"m1"}.__contains__)
    assert (seen["requests_per_s"], seen["queue_rows"], seen["p99_s"]) == ([2, 4], [0, 0], [None, None])


def test_versions_of_a_model_are_one_series() -> None:
    scene = Scene()
    for version, seconds in (("1", 0.001), ("2", 1.0)):
        scene.registry.counter(c.REQUESTS, "m1", version, "v2", "ok").add(10)
        scene.registry.histogram(c.REQUEST_DURATION, "m1", version, "cpu", "v2").observe(seconds, 10)
    scene.enter({})
    found = scene.history.document(0.0, "m1", None)
    assert found["requests_per_s"] == [2]
    assert found["p50_s"][0] <= 0.001 < 0.5 < found["p99_s"][0]


def test_of_many_busy_models_the_busiest_are_kept_and_of_others_nothing_is_known() -> None:
    scene = Scene()
    scene.enter({f"m{number}": 10 + number for number in range(MODELS_MAX + 1)})
    assert scene.history.document(0.0, "m0", None)["requests_per_s"] == [None]
    assert scene.history.document(0.0, "m1", None)["requests_per_s"] == [1.1]


def test_the_history_is_bounded() -> None:
    scene = Scene()
    for _ in range(ENTRIES_MAX + 5):
        scene.enter({"m1": 1})
    found = scene.history.document(0.0, None, None)
    assert (len(found["at"]), found["at"][0]) == (ENTRIES_MAX, 1060)


def test_before_the_first_entry_there_are_empty_series() -> None:
    assert Scene().history.document(0.0, None, None)["p50_s"] == []
