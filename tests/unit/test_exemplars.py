"""Exemplars: kept by bucket, shared by the processes of a folder, shown in OpenMetrics alone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

from millstream.services.metrics import exemplars as module
from millstream.services.metrics.catalogue import REQUEST_DURATION
from millstream.services.metrics.exemplars import ExemplarFile
from millstream.services.metrics.page import MetricsPage
from millstream.services.metrics.registry import MetricsRegistry

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
LABELS = ("m", "1", "cpu", "v2")
TRACES = [f"{number:032x}" for number in range(1, 5)]


def registries(tmp_path: Path) -> list[MetricsRegistry]:
    return [MetricsRegistry(tmp_path, f"gateway-{index}") for index in range(2)]


def observe(registry: MetricsRegistry, value: float, trace_id: str, now: float = 0.0) -> None:
    registry.histogram(REQUEST_DURATION, *LABELS).observe(value)
    registry.exemplars.note(REQUEST_DURATION, LABELS, value, trace_id)
    registry.exemplars.publish(now=now)


def shown(page: MetricsPage) -> dict[float, tuple[str, float]]:
    """Trace id and value by the bucket's bound, as a parser of OpenMetrics reads the page."""
    text = page.render(OPENMETRICS)[0].decode()
    found = {}
    for family in parse(text):
        for sample in family.samples:
            if sample.exemplar is not None:
                assert (sample.name, sample.labels["model"]) == ("millstream_request_duration_seconds_bucket", "m")
                assert float(sample.exemplar.timestamp) == pytest.approx(time.time(), abs=300)
                found[float(sample.labels["le"])] = sample.exemplar.labels["trace_id"], sample.exemplar.value
    return found


def test_page_of_any_process_shows_the_exemplars_of_all(tmp_path: Path) -> None:
    first, second = registries(tmp_path)
    observe(first, 0.004, TRACES[0])
    observe(second, 0.3, TRACES[1])
    for registry in (first, second):
        assert shown(MetricsPage(registry)) == {0.005: (TRACES[0], 0.004), 0.5: (TRACES[1], 0.3)}
    first.close()
    assert shown(MetricsPage(second)) == {0.5: (TRACES[1], 0.3)}
    second.close()
    assert not list(tmp_path.glob("*.exemplars*"))


def test_last_exemplar_of_a_bucket_is_shown_though_its_counts_did_not_change(tmp_path: Path) -> None:
    registry, _ = registries(tmp_path)
    page = MetricsPage(registry)
    observe(registry, 100.0, TRACES[0])
    assert shown(page) == {float("inf"): (TRACES[0], 100.0)}
    registry.exemplars.note(REQUEST_DURATION, LABELS, 90.0, TRACES[1])
    registry.exemplars.publish(now=0.5)
    assert shown(page) == {float("inf"): (TRACES[0], 100.0)}, "it was written a moment ago"
    registry.exemplars.publish(now=1.0)
    assert shown(page) == {float("inf"): (TRACES[1], 90.0)}


def test_text_format_has_no_exemplars(tmp_path: Path) -> None:
    registry, _ = registries(tmp_path)
    observe(registry, 0.004, TRACES[0])
    assert TRACES[0] not in MetricsPage(registry).render(None)[0].decode()


def test_process_alone_shows_its_own() -> None:
    registry = MetricsRegistry(None, "gateway-0")
    observe(registry, 0.004, TRACES[0])
    assert shown(MetricsPage(registry)) == {0.005: (TRACES[0], 0.004)}


def test_files_that_are_old_broken_or_of_another_release_do_no_harm(tmp_path: Path) -> None:
    registry, _ = registries(tmp_path)
    observe(registry, 0.004, TRACES[0])
    old = tmp_path / "gateway-9-1-a.exemplars"
    old.write_text("[]")
    os.utime(old, (1, 1))
    (tmp_path / "gateway-8-1-a.exemplars").write_text("{")
    (tmp_path / "gateway-7-1-a.exemplars").write_text('[["x"], 3]')
    at = time.time()
    other = [[REQUEST_DURATION.name, list(LABELS), [[99, [TRACES[2], 1.0, at]], [3, [TRACES[3], 0.001, at - 9e5]]]]]
    (tmp_path / "gateway-6-1-a.exemplars").write_text(json.dumps(other))
    assert shown(MetricsPage(registry)) == {0.005: (TRACES[0], 0.004)}
    assert not old.exists()


def test_number_of_series_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SERIES_MAX", 2)
    file = ExemplarFile(None)
    for model in "abc":
        file.note(REQUEST_DURATION, (model, "1", "cpu", "v2"), 0.1, TRACES[0])
    file.publish(now=0.0)
    assert [labels[0] for _, labels in file.published] == ["b", "c"]
