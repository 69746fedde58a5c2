"""Every panel finds data in a real Prometheus that scraped a real loaded run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from deploy.grafana.build import PAGES
from deploy.grafana.races import RACES
from deploy.grafana.table import Row, render, rows
from tests.kit.prometheus import LivePrometheus
from tests.kit.stack import Stack, sigstopped
from tests.kit.wait import wait_until
from tests.kit.watched import INTRO, PAGE, WINDOW, watched_stack

pytestmark = pytest.mark.needs("prometheus")

#: panels whose events this run does not have -> why, and the tests that have them
WITHOUT_DATA = {
    "Memory of accelerators": "needs an accelerator: tests/faults/test_device_memory.py",
    **dict.fromkeys(
        (chart.title for chart in RACES.charts[1:]),
        "needs races, which take minutes: tests/integration/test_race_live.py",
    ),
    "API keys that expire": "needs an API key: tests/integration/test_access.py",
    "Certificates that expire": "needs TLS: tests/integration/test_tls.py",
    "Traces and access log": "needs a receiver of traces: tests/integration/test_tracing.py",
}
#: panels whose events a busy machine may cause -> why
MAY_HAVE_DATA = {"Readiness probes unanswered": "a probe waits two seconds for its worker: tested below"}
PANELS = [(page.name, chart.title) for page in PAGES for chart in page.charts]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, LivePrometheus]]:
    with watched_stack(tmp_path_factory.mktemp("watched")) as watched:
        yield watched


@pytest.fixture(scope="module")
def found(watched: tuple[Stack, LivePrometheus]) -> dict[tuple[str, str], Row]:
    """The rows of all panels by page and title. After a scrape that failed, gauges have no value until the next one."""
    _, prometheus = watched
    found: dict[tuple[str, str], Row] = {}

    def complete() -> bool:
        found.update({(row.page.name, row.chart.title): row for row in rows(prometheus.ask, WINDOW) if row.lines})
        return all(panel in found or panel[1] in WITHOUT_DATA.keys() | MAY_HAVE_DATA.keys() for panel in PANELS)

    with suppress(AssertionError):  # the tests of the panels tell which have no data
        wait_until(complete)
    return {(row.page.name, row.chart.title): row for row in rows(prometheus.ask, WINDOW)} | found


@pytest.mark.parametrize(("page", "title"), PANELS)
def test_a_panel_finds_data(found: dict[tuple[str, str], Row], page: str, title: str) -> None:
    row = found[page, title]
    if title not in MAY_HAVE_DATA:
        assert bool(row.lines) is (title not in WITHOUT_DATA), row.chart.queries
    assert all(value >= 0 for _, value in row.lines)


def test_the_page_has_a_row_for_each_panel(found: dict[tuple[str, str], Row]) -> None:
    """Results differ from run to run; titles, descriptions and which panels have data do not."""

    def compared(text: str) -> list[list[str]]:
        cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
        return [
            [*row[:-1], "no data" if row[-1].startswith("no data") and row[1] not in MAY_HAVE_DATA else "data"]
            for row in cells
        ]

    assert PAGE.read_text().startswith(INTRO)
    assert compared(PAGE.read_text()) == compared(render(iter(found.values()))), "run `python -m tests.kit.watched`"


def test_unlisted_panels_are_not_excused() -> None:
    assert WITHOUT_DATA.keys() | MAY_HAVE_DATA.keys() <= {title for _, title in PANELS}


def test_the_memory_of_redis_and_its_limit_are_shown(watched: tuple[Stack, LivePrometheus]) -> None:
    stack, _ = watched
    assert stack.metrics().value("millstream_redis_memory_limit_bytes") == 0
    used = int(stack.redis.info("memory")["used_memory"])
    assert used / 4 < stack.metrics().value("millstream_redis_memory_used_bytes") < 4 * used
    limit = used + (256 << 20)
    stack.redis.config_set("maxmemory", limit)
    try:
        wait_until(lambda: stack.metrics().value("millstream_redis_memory_limit_bytes") == limit)
    finally:
        stack.redis.config_set("maxmemory", 0)
    wait_until(lambda: stack.metrics().value("millstream_redis_memory_limit_bytes") == 0)


def test_probes_that_no_worker_answers_are_counted_and_the_gateway_is_not_ready(
    watched: tuple[Stack, LivePrometheus],
) -> None:
    stack, _ = watched
    wait_until(lambda: stack.metrics().value("millstream_gateway_ready", process="gateway-0") == 1)
    pids = [pid for name, pid in stack.pids().items() if name.startswith("cpu-")]
    with sigstopped(*pids):
        wait_until(lambda: stack.metrics().value("millstream_readiness_probes_unanswered_total", pool="cpu") > 0)
        wait_until(lambda: stack.metrics().value("millstream_gateway_ready", process="gateway-0") == 0)
    wait_until(lambda: stack.metrics().value("millstream_gateway_ready", process="gateway-0") == 1)
