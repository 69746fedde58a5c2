"""A page that keeps the lines of the last one is the page that a fresh one would be."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from millstream.services.metrics import catalogue
from millstream.services.metrics.page import GaugeSample, MetricsPage
from millstream.services.metrics.registry import MetricsRegistry

_MODELS = st.sampled_from(["a", "b", 'quo"te', "c\\d", "new\nline"])
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("count"), _MODELS),
        st.tuples(st.just("observe"), _MODELS),
        st.tuples(st.just("gauge"), _MODELS),
        st.tuples(st.just("remove"), _MODELS),
        st.tuples(st.just("page"), st.sampled_from(["text/plain", "application/openmetrics-text; version=1.0.0", ""])),
        st.tuples(st.just("process"), st.just("")),
    ),
    max_size=30,
)


@given(_STEPS)
def test_a_kept_page_is_a_fresh_page(steps: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tallies = [MetricsRegistry(Path(folder), "gateway")]
        page = MetricsPage(tallies[0])
        for what, name in [*steps, ("page", "text/plain")]:
            labels = (name, "1", "cpu")
            mine = tallies[-1]
            if what == "count":
                mine.counter(catalogue.BATCHES, *labels, "ok").add()
            elif what == "observe":
                mine.histogram(catalogue.REQUEST_DURATION, *labels, "v2").observe(0.003)
            elif what == "gauge":
                mine.gauge(catalogue.LANE_ROWS, *labels).add(3)
            elif what == "remove":
                mine.remove(catalogue.LANE_ROWS, *labels)
            elif what == "process":
                tallies.append(MetricsRegistry(Path(folder), "worker"))
            else:
                moment = [GaugeSample(catalogue.STREAM_ENTRIES, ("m", "1", "cpu"), float(len(tallies)))]
                fresh = MetricsPage(tallies[0]).render(name, extra_gauges=moment)
                assert page.render(name, extra_gauges=moment) == fresh
        for tally in tallies:
            tally.close()


def test_any_number_of_forms_takes_bounded_memory() -> None:
    page = MetricsPage(MetricsRegistry(None, "gateway"))
    for version in range(20):
        page.render(f"application/openmetrics-text; version=1.{version}.0")
    assert len(page._formats) <= 2
