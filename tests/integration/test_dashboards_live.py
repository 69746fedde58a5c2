"""Every panel finds data in a real Prometheus that scraped a real loaded run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deploy.grafana.build import PAGES
from deploy.grafana.table import Row, render
from tests.kit.prometheus import LivePrometheus
from tests.kit.stack import Stack, sigstopped
from tests.kit.wait import wait_until
from tests.kit.watched import INTRO, PAGE, found_rows, watched_stack

pytestmark = [pytest.mark.needs("prometheus"), pytest.mark.needs("openssl")]

PANELS = [(page.name, chart.title) for page in PAGES for chart in page.charts]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, LivePrometheus]]:
    with watched_stack(tmp_path_factory.mktemp("watched")) as watched:
        yield watched


@pytest.fixture(scope="module")
def found(watched: tuple[Stack, LivePrometheus]) -> dict[tuple[str, str], Row]:
    """The rows of all panels by page and title."""
    return {(row.page.name, row.chart.title): row for row in found_rows(watched[1])}


@pytest.mark.parametrize(("page", "title"), PANELS)
def test_a_panel_finds_data(found: dict[tuple[str, str], Row], page: str, title: str) -> None:
    row = found[page, title]
    assert row.lines, row.chart.queries
    assert all(value >= 0 for _, value in row.lines)


def test_the_page_has_a_row_for_each_panel(found: dict[tuple[str, str], Row]) -> None:
    """Results differ from run to run; titles and descriptions do not."""

    def compared(text: str) -> list[list[str]]:
        return [line.split(" | ")[:-1] for line in text.splitlines() if line.startswith("| ")]

    assert PAGE.read_text().startswith(INTRO)
    assert compared(PAGE.read_text()) == compared(render(iter(found.values()))), "run `python -m tests.kit.watched`"
    assert "no data" not in PAGE.read_text()


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
