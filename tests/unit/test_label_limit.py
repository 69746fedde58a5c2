"""The busiest models have series of their own on the page; no counter falls, and the sums are those of the files."""

from __future__ import annotations

import fcntl
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.services.metrics import catalogue, inference
from millstream.services.metrics.catalogue import Metric
from millstream.services.metrics.label_limit import CHOOSE_S, Shares, fold, is_of_model
from millstream.services.metrics.page import GaugeSample, MetricsPage
from millstream.services.metrics.page_totals import PageTotals
from millstream.services.metrics.record import OTHER, Totals
from millstream.services.metrics.registry import ENDED_S, MetricsRegistry

LANE = ("1", "cpu")


class _Process:
    """A process that serves models and shows pages, on a clock of the test."""

    def __init__(self, directory: Path | None, name: str, models_max: int, now: list[float]) -> None:
        self.registry = MetricsRegistry(directory, name, models_max=models_max)
        self.registry._page_totals = PageTotals(directory, self.registry.totals, models_max, lambda: now[0])

    def serve(self, model: str, requests: int, seconds: float = 0.01) -> None:
        for _ in range(requests):
            self.registry.counter(catalogue.REQUESTS, model, "1", "v2", "ok").add()
            self.registry.histogram(catalogue.EXECUTION_DURATION, model, *LANE).observe(seconds)
        self.registry.counter_vector(inference.REQUESTS, model, "1", f"{model}:1:x").add(requests, seconds)

    def page(self, deleted: frozenset[str] = frozenset()) -> Totals:
        return self.registry.page_totals(_without(deleted))[0]


def _without(deleted: frozenset[str]) -> Callable[[str, str | None], bool]:
    return lambda model, _version: model not in deleted


def _counts(totals: Totals, metric: Metric) -> dict[str, float]:
    """Return the first value of a metric's series, by model."""
    return {key.labels[0]: values[0] for key, values in totals.items() if key.name == metric.name}


def test_few_models_all_have_series_of_their_own(tmp_path: Path) -> None:
    process = _Process(tmp_path, "gateway-0", 3, [0.0])
    for model in "abc":
        process.serve(model, 2)
    assert _counts(process.page(), catalogue.REQUESTS) == {"a": 2, "b": 2, "c": 2}
    assert process.registry.page_totals()[1] is None
    assert not (tmp_path / "shares").exists()


@pytest.mark.parametrize("shared", [True, False])
def test_the_busiest_of_the_last_minutes_have_series_of_their_own(tmp_path: Path, shared: bool) -> None:
    now = [0.0]
    process = _Process(tmp_path if shared else None, "gateway-0", 2, now)
    for model, requests in {"a": 5, "b": 9, "c": 7, "d": 1}.items():
        process.serve(model, requests)
    assert _counts(process.page(), catalogue.REQUESTS).keys() == {"b", "c", OTHER}
    for _ in range(4):
        now[0] += CHOOSE_S
        process.serve("d", 100)
        process.serve("c", 1)
        page = process.page()
    assert _counts(page, catalogue.REQUESTS).keys() == {"c", "d", OTHER}


def test_no_counter_falls_and_the_sums_are_right_whoever_answers(tmp_path: Path) -> None:
    """As Prometheus sees it: two gateways answer its scrapes in turn while the busiest models change."""
    now, draw = [0.0], random.Random(3)
    processes = [_Process(tmp_path, f"gateway-{number}", 10, now) for number in range(2)]
    models = [f"m{number}" for number in range(60)]
    for model in models:
        processes[0].serve(model, 1)
    last: Totals = Totals()
    shown: set[str] = set()
    for _ in range(150):
        now[0] += draw.choice((1.0, CHOOSE_S / 2, CHOOSE_S))
        for model in draw.sample(models, 8):
            draw.choice(processes).serve(model, draw.randrange(1, 30), draw.random())
        page = draw.choice(processes).page()
        for key, values in page.items():
            if key.kind.lasting and key in last:
                assert all(map(float.__ge__, values, last[key])), key
        last |= page
        shown |= {key.labels[0] for key in page if is_of_model(key)}
        assert len({key.labels[0] for key in page if is_of_model(key)}) <= 10
        whole = processes[0].registry.totals()
        for metric in (catalogue.REQUESTS, catalogue.EXECUTION_DURATION):
            assert sum(_counts(page, metric).values()) <= sum(_counts(whole, metric).values())
    assert len(shown) > 20
    # A series that left the page keeps what it showed last: the last values of all add up to everything.
    for metric in (catalogue.REQUESTS, inference.REQUESTS):
        assert sum(_counts(last, metric).values()) == sum(_counts(whole, metric).values())


def test_a_thousand_models_fit_on_a_bounded_page() -> None:
    registry = MetricsRegistry(None, "gateway-0")
    for number in range(1000):
        model = f"model-{number:04d}"
        registry.counter(catalogue.REQUESTS, model, "1", "v2", "ok").add(number)
        for metric in (catalogue.EXECUTION_DURATION, catalogue.QUEUE_WAIT_SECONDS):
            registry.histogram(metric, model, *LANE).observe(0.01)
        registry.gauge(catalogue.INSTANCES_READY, model, *LANE).set(2)
    depths = [GaugeSample(catalogue.STREAM_ENTRIES, (f"model-{number:04d}", *LANE), 1.0) for number in range(1000)]
    body, _ = MetricsPage(registry).render(None, extra_gauges=depths)
    text = body.decode()
    assert set(re.findall(r'model="([^"]+)"', text)) == {*(f"model-{n:04d}" for n in range(800, 1000)), OTHER}
    assert 'millstream_requests_total{model="other",outcome="ok",protocol="v2",version="other"} 319600.0' in text
    assert 'millstream_instances_ready{model="other",pool="cpu",version="other"} 1600.0' in text
    assert 'millstream_stream_entries{model="other",pool="cpu",version="other"} 800.0' in text
    assert 'millstream_execution_duration_seconds_count{model="other",pool="cpu",version="other"} 800.0' in text
    assert text.count("\n") < 201 * 50 + 500


def test_the_series_of_deleted_versions_end(tmp_path: Path) -> None:
    process = _Process(tmp_path, "gateway-0", 50, [0.0])
    for model in ("kept", "gone"):
        process.serve(model, 3)
    assert {key.labels[0] for key in process.page(frozenset({"gone"})) if is_of_model(key)} == {"kept"}
    bytes_before = sum(path.stat().st_size for path in tmp_path.iterdir())
    for number in range(500):  # versions come and go for months, in a file that does not grow
        process.serve(f"m{number}", 1)
        for now in (0.0, ENDED_S):
            process.registry.end_series(_without(frozenset({"gone", f"m{number}"})), now)
    assert {key.labels[0] for key in process.registry.totals() if is_of_model(key)} == {"kept"}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == bytes_before
    assert process.registry.counts(catalogue.SERIES_REFUSED) == {(): 0}


def test_a_series_that_ended_takes_late_counts_without_touching_others(tmp_path: Path) -> None:
    registry = MetricsRegistry(tmp_path, "gateway-0")
    late = registry.counter(catalogue.REQUESTS, "gone", "1", "v2", "ok")
    spread = registry.histogram(catalogue.EXECUTION_DURATION, "gone", *LANE)
    sums = registry.counter_vector(inference.REQUESTS, "gone", "1", "gone:1:x")
    for now in (0.0, ENDED_S):
        registry.end_series(_without(frozenset({"gone"})), now)
    registry.counter(catalogue.REQUESTS, "next", "1", "v2", "ok").add(2)
    registry.histogram(catalogue.EXECUTION_DURATION, "next", *LANE).observe(0.01)
    registry.counter_vector(inference.REQUESTS, "next", "1", "next:1:x").add(5)
    late.add(7)
    spread.observe(1.0, 9)
    sums.add(11)
    totals = registry.totals()
    assert _counts(totals, catalogue.REQUESTS) == {"next": 2}
    assert _counts(totals, inference.REQUESTS) == {"next": 5}
    assert sum(next(v for k, v in totals.items() if k.name == catalogue.EXECUTION_DURATION.name)[:-1]) == 1


def test_no_counter_falls_while_models_are_deleted(tmp_path: Path) -> None:
    """With more models than have series of their own: what deleted ones counted under `other` stays there."""
    now, draw = [0.0], random.Random(5)
    processes = [_Process(tmp_path, f"gateway-{number}", 5, now) for number in range(2)]
    models = [f"m{number}" for number in range(30)]
    deleted: frozenset[str] = frozenset()
    last: Totals = Totals()
    for _ in range(300):
        now[0] += draw.choice((1.0, CHOOSE_S / 2, CHOOSE_S))
        for model in draw.sample(models, 4):
            if model not in deleted:
                draw.choice(processes).serve(model, draw.randrange(1, 30), draw.random())
        if draw.random() < 0.1 and len(deleted) < 22:
            deleted |= {draw.choice(models)}
        page = draw.choice(processes).page(deleted)
        for process in processes:
            process.registry.end_series(_without(deleted), now[0])
        assert not {key.labels[0] for key in page if is_of_model(key)} & deleted
        for key, values in page.items():
            if key.kind.lasting and key in last:
                assert all(map(float.__ge__, values, last[key])), key
        last = page
    assert len(deleted) > 10


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"at": 1}', b'{"at": [], "shown": 1}', b"\xff"])
def test_damaged_shares_are_chosen_anew(tmp_path: Path, content: bytes) -> None:
    process = _Process(tmp_path, "gateway-0", 1, [0.0])
    process.serve("a", 1)
    process.serve("b", 2)
    (tmp_path / "shares").write_bytes(content)
    assert _counts(process.page(), catalogue.REQUESTS).keys() == {"b", OTHER}


def test_a_process_that_is_frozen_with_the_lock_blocks_no_page(tmp_path: Path) -> None:
    now = [0.0]
    process = _Process(tmp_path, "gateway-0", 1, now)
    process.serve("a", 1)
    process.serve("b", 2)
    before = process.page()
    now[0] = 2 * CHOOSE_S
    process.serve("a", 50)
    descriptor = os.open(tmp_path / "shares.lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert _counts(process.page(), catalogue.REQUESTS) == _counts(before, catalogue.REQUESTS) | {OTHER: 51.0}
    os.close(descriptor)
    assert "a" in _counts(process.page(), catalogue.REQUESTS) or OTHER in _counts(process.page(), catalogue.REQUESTS)


def test_counts_that_began_again_from_zero_are_shown_as_they_are() -> None:
    """After a power cut the files are new; the shares may have survived."""
    registry = MetricsRegistry(None, "gateway-0")
    counter = registry.counter(catalogue.REQUESTS, "a", "1", "v2", "ok")
    counter.add(3)
    totals = registry.totals()
    [key] = [key for key in totals if key.name == catalogue.REQUESTS.name]
    for shares in (Shares(shown=frozenset("a"), base={key: [9.0]}), Shares(own={key: [9.0]})):
        assert sum(_counts(fold(totals, shares), catalogue.REQUESTS).values()) == 3


def test_the_label_model_is_the_first_of_every_metric_that_has_it() -> None:
    every = (*catalogue.CATALOGUE, inference.REQUESTS, inference.RUNS, inference.LAST, inference.PENDING)
    assert [one.name for one in every if "model" in one.labels and one.labels[0] != "model"] == []
