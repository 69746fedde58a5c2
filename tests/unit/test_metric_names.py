"""The catalogue follows Prometheus' naming guide, and docs/metrics.md is written from it.

Source: prometheus.io/docs/practices/naming and the linter of `promtool check metrics`.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from millstream.services.metrics.catalogue import CATALOGUE, Kind, Metric
from tests.kit.metrics_reference import LABELS, PAGE, QUERIES, SAGEMAKER, page

pytestmark = pytest.mark.plugins

ROOT = Path(__file__).parents[2]
FOLDERS = ("gateway", "workers", "services", "plugins")

#: units that are not base units, and abbreviations of units
_NOT_BASE = {
    *("ms", "us", "ns", "milliseconds", "microseconds", "minutes", "hours", "s", "sec", "secs"),
    *("kb", "kib", "mb", "mib", "gb", "gib", "kilobytes", "megabytes", "byte", "percent", "pct", "celsius_c"),
}
_TYPES = {"counter", "gauge", "histogram", "summary"}
_RESERVED = {"le", "quantile", "job", "instance"}  # Prometheus gives them a meaning of its own

every_metric = pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)


@every_metric
def test_the_name_has_base_units_and_the_right_ending(metric: Metric) -> None:
    assert re.fullmatch(r"millstream(_[a-z0-9]+)+", metric.name)
    words = metric.name.split("_")
    assert not _NOT_BASE & set(words)
    assert not _TYPES & set(words)
    assert (words[-1] == "total") is (metric.kind is Kind.COUNTER)
    assert words[-1] not in {"bucket", "sum", "count"}
    if metric.kind is Kind.HISTOGRAM:
        assert words[-1] in {"seconds", "bytes", "rows"}
    for unit in ("seconds", "bytes"):
        if unit in words:
            assert words[-2:] == [unit, "total"] or words[-1] == unit, "the unit comes last"


@every_metric
def test_the_labels_are_plain_and_none_repeats_the_name(metric: Metric) -> None:
    assert all(re.fullmatch(r"[a-z]+", label) for label in metric.labels)
    assert not _RESERVED & set(metric.labels)
    assert len(set(metric.labels)) == len(metric.labels)
    assert metric.name.removeprefix("millstream_") not in metric.labels
    assert set(metric.labels) <= LABELS.keys(), "docs/metrics.md says what its values are"


@every_metric
def test_the_help_is_one_plain_sentence(metric: Metric) -> None:
    assert re.fullmatch(r"[A-Z0-9][^.:;]*\.", metric.help)
    assert len(metric.help) <= 100
    assert not re.search(r"\b(counter|gauge|histogram|metric|nobody|whoever|somebody)\b", metric.help.lower())


@every_metric
def test_buckets_ascend_and_are_not_too_many(metric: Metric) -> None:
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert len(metric.buckets) <= 20
    assert bool(metric.buckets) is (metric.kind is Kind.HISTOGRAM)


def test_no_name_is_there_twice() -> None:
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)


def test_only_gauges_are_infos() -> None:
    infos = [metric for metric in CATALOGUE if metric.name.endswith("_info")]
    assert {metric.kind for metric in infos} == {Kind.GAUGE_MAX}
    assert all(metric.labels for metric in infos)


def test_the_page_is_what_the_catalogue_says() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.kit.metrics_reference`"


def test_the_names_beside_those_of_sagemaker_exist() -> None:
    names = {name for _, ours, _ in SAGEMAKER for name in ours.split(", ") if name}
    assert names <= {metric.name for metric in CATALOGUE}


def test_the_page_explains_no_label_that_is_gone_and_asks_ten_queries() -> None:
    assert {label for metric in CATALOGUE for label in metric.labels} == LABELS.keys()
    assert len(QUERIES) == 10


def _sources(folder: str) -> dict[Path, str]:
    return {path: path.read_text() for path in (ROOT / folder).rglob("*.py")}


def test_what_is_defined_is_counted() -> None:
    """A metric that no code sets, or a method that no code calls, leaves a panel empty for ever."""
    sources = {path: text for folder in FOLDERS for path, text in _sources(folder).items()}
    used: Counter[str] = Counter(word for text in sources.values() for word in re.findall(r"\b[A-Za-z_]\w+\b", text))
    defined = re.findall(r"^([A-Z_]+) = Metric\(", sources[ROOT / "services/metrics/catalogue.py"], re.MULTILINE)
    methods = [
        name
        for path, text in sources.items()
        if path.stem.endswith("metrics")
        for name in re.findall(r"^    def ([a-z]\w+)\(", text, re.MULTILINE)
    ]
    assert len(defined) > 50
    assert len(methods) > 20
    assert [name for name in (*defined, *methods) if used[name] < 2] == []
