"""What the console calls wrong: each problem by what a gateway counts and sees, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.gateway.catalog.snapshot import Snapshot
from millstream.plugins.console.gateway.problems import PROBLEMS_MAX, problems
from millstream.plugins.console.gateway.rates import Counts, Growth
from millstream.services.metrics import catalogue as c
from millstream.services.metrics.files import ReadCache
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.repository.endpoint_changes import activate_version
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.records import State
from tests.kit.catalog import RepositoryCatalog, instance, worker
from tests.kit.versions import publish

pytestmark = pytest.mark.anyio
AT, DAY_S = 1_800_000_000.0, 86_400.0
HEALTHY = Snapshot({}, (worker(),))
DISK = (1000, 900)
Change = Callable[[MetricsRegistry], None]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def found(
    change: Change = lambda _: None,
    *,
    before: Change = lambda _: None,
    snapshot: Snapshot = HEALTHY,
    disk: tuple[int, int] = DISK,
) -> list[dict[str, Any]]:
    """The problems of a gateway that counted `before`, and then `change`."""
    registry, counts = MetricsRegistry(None, "gateway-0"), Counts()
    before(registry)
    first = counts.read(1.0, registry.parts(ReadCache()), {"m"})
    change(registry)
    return problems(Growth(first, counts.read(11.0, registry.parts(ReadCache()), {"m"})), snapshot, disk, AT)


def answered(outcome: str, count: int) -> Change:
    return lambda registry: registry.counter(c.REQUESTS, "m", "1", "v2", outcome).add(count)


def both(*changes: Change) -> Change:
    def change(registry: MetricsRegistry) -> None:
        for one in changes:
            one(registry)

    return change


def shows(metric: c.Metric, value: float, *labels: str) -> Change:
    return lambda registry: registry.gauge(metric, *labels).set(value)


def counts(metric: c.Metric, value: float, *labels: str) -> Change:
    return lambda registry: registry.counter(metric, *labels).add(value)


ONE: list[tuple[Change, str, str]] = [
    (shows(c.GATEWAY_READY, 0, "gateway-0"), "critical", "gateway-0 is not ready"),
    (shows(c.REDIS_UP, 0, "gateway-0"), "critical", "Redis does not answer gateway-0"),
    (
        both(shows(c.REDIS_MEMORY_USED_BYTES, 90), shows(c.REDIS_MEMORY_LIMIT_BYTES, 100)),
        "critical",
        "Redis uses 90% of its memory limit",
    ),
    (both(answered("ok", 90), answered("model", 10)), "critical", "m: 10% of the requests fail"),
    (shows(c.VERSION_REFUSED, 1, "m", "1", "cpu"), "critical", "m 1 keeps ending its workers and is refused"),
    (shows(c.LANE_ROWS, 3, "m", "1", "cpu"), "critical", "m 1: rows wait, nothing is ready"),
    (
        both(shows(c.WORKERS_WANTED, 3, "cpu"), shows(c.WORKERS_READY, 1, "cpu")),
        "warning",
        "Pool cpu has fewer workers than the 3 that it needs",
    ),
    (counts(c.BATCHES_RECLAIMED, 1, "cpu"), "warning", "Pool cpu loses workers"),
    (shows(c.CONTROLLER_LEADS, 0), "warning", "No controller leads"),
    (counts(c.REQUESTS_REFUSED, 20, "lane_full"), "warning", "Requests are refused: lane_full"),
    (shows(c.REQUESTS_QUARANTINED, 2), "warning", "2 requests are refused because they killed workers"),
    (shows(c.BATCHING_OFF, 1, "m", "1"), "warning", "m 1: its rows influence each other, batching is off"),
    (
        both(shows(c.PROCESS_OPEN_FDS, 95, "gateway-0"), shows(c.PROCESS_MAX_FDS, 100, "gateway-0")),
        "warning",
        "gateway-0 has 95% of its file descriptors open",
    ),
    (
        shows(c.TLS_CERTIFICATE_EXPIRY, AT + 2 * DAY_S, "http"),
        "warning",
        "The certificate of http expires in 2.0 days",
    ),
    (shows(c.KEY_EXPIRY, AT + DAY_S, "ci"), "warning", "API key ci expires in 1.0 days"),
]


@pytest.mark.parametrize(("change", "severity", "title"), ONE, ids=[title for _, _, title in ONE])
def test_each_problem_alone_is_told_with_what_to_do(change: Change, severity: str, title: str) -> None:
    [one] = found(change)
    assert (one["severity"], one["title"]) == (severity, title)
    assert one["detail"].endswith(".")
    assert one["action"]


@pytest.mark.parametrize(
    "change",
    [
        answered("ok", 1000),
        both(answered("ok", 96), answered("model", 4)),  # few
        both(answered("ok", 996), answered("model", 40)),  # a small share
        both(answered("ok", 10), answered("invalid", 1000)),  # the callers' fault
        both(shows(c.LANE_ROWS, 3, "m", "1", "cpu"), shows(c.INSTANCES_READY, 1, "m", "1", "cpu")),
        both(shows(c.WORKERS_WANTED, 1, "cpu"), shows(c.WORKERS_READY, 1, "cpu")),
        both(shows(c.REDIS_MEMORY_USED_BYTES, 80), shows(c.REDIS_MEMORY_LIMIT_BYTES, 100)),
        both(shows(c.REDIS_MEMORY_USED_BYTES, 80), shows(c.REDIS_MEMORY_LIMIT_BYTES, 0)),  # without a limit
        shows(c.CONTROLLER_LEADS, 1),
        shows(c.KEY_EXPIRY, AT - DAY_S, "old"),
        shows(c.KEY_EXPIRY, AT + 8 * DAY_S, "ci"),
        shows(c.TLS_CERTIFICATE_EXPIRY, AT + 15 * DAY_S, "http"),
        shows(c.GATEWAY_READY, 1, "gateway-0"),
    ],
)
def test_what_is_usual_is_no_problem(change: Change) -> None:
    assert found(change) == []


def test_what_happened_before_is_over() -> None:
    past = both(
        answered("model", 100), counts(c.BATCHES_RECLAIMED, 5, "cpu"), counts(c.REQUESTS_REFUSED, 9, "deadline")
    )
    assert found(before=past) == []


def test_without_workers_nothing_is_answered_unless_none_are_needed() -> None:
    nobody = Snapshot({}, ())
    assert [one["title"] for one in found(snapshot=nobody)] == ["No worker is running"]
    asleep = both(shows(c.WORKERS_WANTED, 0, "cpu"), shows(c.GATEWAY_READY, 0, "gateway-0"))
    assert found(asleep, snapshot=nobody) == []


@pytest.mark.parametrize(("disk", "told"), [((1000, 99), 1), ((1000, 100), 0), ((0, 0), 0)])
def test_a_full_disk_is_told(disk: tuple[int, int], told: int) -> None:
    assert len(found(disk=disk)) == told


async def test_a_version_that_cannot_be_loaded_is_told_with_a_bounded_reason(tmp_path: Path) -> None:
    repository = FolderRepository(tmp_path)
    manifest = publish(repository, "m", 1)
    activate_version(repository, "m", 1)
    catalog = RepositoryCatalog(repository)
    await catalog.set_workers(worker(instance(manifest, State.FAILED, "<b>no</b> " * 1000)))
    [one] = found(snapshot=catalog.snapshot)
    assert (one["title"], one["model"], len(one["detail"])) == ("m 1 could not be loaded", "m", 300)


def test_the_critical_ones_come_first_and_their_number_is_bounded() -> None:
    keys = [shows(c.KEY_EXPIRY, AT + DAY_S, f"key-{number}") for number in range(2 * PROBLEMS_MAX)]
    told = found(both(*keys, shows(c.REDIS_UP, 0, "gateway-0")))
    assert len(told) == PROBLEMS_MAX
    assert told[0]["severity"] == "critical"
