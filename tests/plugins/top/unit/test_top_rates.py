"""What `millstream top` computes from two readings of a server, and how it fits a terminal."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from rich.console import Console, ConsoleDimensions
from rich.screen import Screen

from millstream.client.cli import terminal
from millstream.client.cli.terminal import rate
from millstream.plugins.top.picture import Sort, picture, rows_max, sorted_endpoints
from millstream.plugins.top.rates import Overview, overview, quantile
from millstream.plugins.top.reading import Reading, reading_of

INF = float("inf")
WORKER = {
    "id": "cpu-0-3f2a",
    "pool": "cpu",
    "device": "cpu",
    "used_bytes": 1 << 20,
    "budget_bytes": 1 << 30,
    "instances_total": 1,
    "draining": False,
}


def page(requests: int, *, failed: int = 0, busy: float = 0.0, model: str = "m", queued: int = 0) -> str:
    labels = f'model="{model}",version="1"'
    return f"""# HELP millstream_requests_total Requests answered, by outcome.
# TYPE millstream_requests_total counter
millstream_requests_total{{{labels},protocol="v2",outcome="ok"}} {requests}
millstream_requests_total{{{labels},protocol="grpc",outcome="overloaded"}} {failed}
millstream_requests_total{{{labels},protocol="grpc",outcome="invalid"}} {2 * failed}
millstream_request_duration_seconds_bucket{{{labels},pool="cpu",protocol="v2",le="0.001"}} {requests / 2}
millstream_request_duration_seconds_bucket{{{labels},pool="cpu",protocol="v2",le="0.002"}} {requests}
millstream_request_duration_seconds_bucket{{{labels},pool="cpu",protocol="v2",le="+Inf"}} {requests}
millstream_batch_rows_sum{{{labels},pool="cpu"}} {requests}
millstream_batch_rows_count{{{labels},pool="cpu"}} {requests / 4}
millstream_lane_rows{{{labels},pool="cpu"}} {queued}
millstream_instances_ready{{{labels},pool="cpu"}} 1
millstream_worker_busy_seconds_total{{pool="cpu",worker="cpu-0"}} {busy}
millstream_process_resident_memory_bytes{{process="worker-cpu-0"}} 5000
millstream_requests_in_flight 3
millstream_gateway_ready{{process="gateway-0"}} 1
millstream_gateway_ready{{process="gateway-1"}} 0
millstream_unrelated_total{{model="m"}} 1
"""


def looks(*pages: str, every_s: float = 2.0, workers: Any = (WORKER,)) -> list[Reading]:
    return [reading_of(number * every_s, one, list(workers)) for number, one in enumerate(pages)]


def test_rates_quantiles_and_shares_are_those_of_the_interval():
    found = overview(*looks(page(1000, failed=1, busy=5), page(1400, failed=3, busy=6, queued=7)))
    assert found.interval_s == 2
    [one] = found.endpoints
    assert (one.requests_per_s, one.failed_per_s, one.invalid_per_s) == (203, 1, 2)
    assert one.p50_s == pytest.approx(0.001)
    assert one.p99_s == pytest.approx(0.00198)
    assert (one.batch_rows, one.queue_rows, one.instances) == (4, 7, 1)
    [worker] = found.workers
    assert (worker.worker, worker.busy, worker.resident_bytes) == ("cpu-0", 0.5, 5000)
    assert (found.totals.requests_per_s, found.totals.in_flight) == (203, 3)
    assert (found.totals.gateways, found.totals.gateways_ready) == (2, 1)


def test_of_a_first_reading_only_the_present_is_known():
    found = overview(None, *looks(page(1000, busy=5)))
    [one] = found.endpoints
    assert (found.interval_s, one.requests_per_s, one.p99_s, one.instances) == (None, None, None, 1)
    assert found.workers[0].busy is None


def test_counters_that_fell_grew_by_nothing():
    found = overview(*looks(page(1000, failed=5, busy=5), page(10)))
    [one] = found.endpoints
    assert (one.requests_per_s, one.failed_per_s, one.p50_s, one.batch_rows) == (0, 0, None, None)
    assert found.workers[0].busy == 0


def test_two_readings_at_one_instant_are_as_one():
    found = overview(*looks(page(1), page(2), every_s=0))
    assert (found.interval_s, found.endpoints[0].requests_per_s) == (None, None)


def test_workers_of_other_machines_have_no_metrics_here():
    other = WORKER | {"id": "gpu-0-77", "pool": "gpu", "budget_bytes": None}
    found = overview(*looks(page(1), page(2), workers=[other]))
    assert (found.workers[0].busy, found.workers[0].resident_bytes) == (None, None)
    assert "gpu-0" in text(found)


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ({}, 0.5, None),
        ({1.0: 0, INF: 0}, 0.5, None),
        ({1.0: 10, INF: 10}, 0.5, 0.5),
        ({1.0: 0, 2.0: 10, INF: 10}, 0.5, 1.5),
        ({1.0: 0, 2.0: 10, INF: 10}, 0.99, 1.99),
        ({1.0: 5, INF: 10}, 0.99, 1.0),
        ({INF: 10}, 0.5, 0.0),
    ],
)
def test_quantiles_are_those_of_prometheus(buckets, share, expected):
    assert quantile(buckets, share) == (None if expected is None else pytest.approx(expected))


def many(count: int) -> Overview:
    before = "".join(page(0, model=f"m{number}") for number in range(count))
    after = "".join(page(number, model=f"m{number}", queued=count - number) for number in range(count))
    return overview(*looks(before, after))


def test_endpoints_are_sorted_by_a_column():
    found = many(12).endpoints
    assert [one.model for one in sorted_endpoints(found, Sort.RATE)][:2] == ["m11", "m10"]
    assert sorted_endpoints(found, Sort.QUEUE)[0].model == "m0"
    assert [one.model for one in sorted_endpoints(found, Sort.NAME)][:3] == ["m0", "m1", "m10"]
    for by in Sort:
        assert len(sorted_endpoints(found, by)) == 12


def text(found: Overview, columns: int = 120, height: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=columns)
    console.print(picture("title", found, Sort.RATE, columns, height))
    shown: Any = console.file
    return str(shown.getvalue())


@pytest.mark.parametrize("height", [10, 24, 50])
def test_a_picture_fits_the_terminal_and_says_what_it_leaves_out(height):
    shown = text(many(200), height=height)
    assert len(shown.splitlines()) <= max(height, 14)
    assert "m199" in shown
    assert "more" in shown
    endpoints, workers = rows_max(height, many(200))
    assert endpoints >= 3
    assert workers == 1


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 200])
def test_a_narrow_terminal_gets_no_wrapped_rows(columns):
    lines = text(many(2), columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert sum("cpu-0" in line for line in lines) == 1


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_live_picture_shows_all_totals(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The consoles of the command line do not wrap, and a screen cuts what is wider than it."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    console = terminal.results()
    console.size = ConsoleDimensions(columns, 24)
    console.print(Screen(picture("title", many(2), Sort.RATE, columns, 24)))
    words = " ".join(stream.getvalue().split())
    assert "rows queued" in words
    assert "Redis" in words


def test_an_empty_server_says_what_to_do():
    shown = text(overview(*looks("", "", workers=())))
    assert "millstream push" in shown
    assert "no worker is running" in shown


def test_names_from_elsewhere_cannot_style_the_terminal():
    shown = text(overview(*looks(page(1, model="[red]x"), page(2, model="[red]x"))))
    assert "[red]x" in shown


def test_rates_have_three_digits():
    assert [rate(one) for one in (None, 0, 0.254, 12.34, 1234.5, 99.96)] == ["-", "0", "0.254", "12.3", "1,234", "100"]
