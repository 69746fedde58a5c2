"""The access log: its lines, its bounds, and what it does on a full disk."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.gateway.observing import access_log as module
from millstream.gateway.observing.access_log import AccessLog, block_writer, json_text, stdout_writer, text_line
from millstream.gateway.observing.finished import BatchTiming, Finished, Run
from millstream.services.metrics.catalogue import ACCESS_LINES_DROPPED
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.supervisor.log import LogFile
from millstream.services.wire.batch import ReplyHeader
from tests.kit.wait import wait_until

ROOT = Path(__file__).parents[2]
HEADER = ReplyHeader("b", "worker-1", 0.1, 0.01, 0.2, 0.01, 3, [3], {}, [], "")
RUN = Run("m", "2", "cpu", "v2", 4, 10.1, BatchTiming(HEADER, 10.2, 10.9, 3))
REQUEST = Finished(
    "http",
    "POST",
    "/v2/models/{model}/infer",
    "/v2/models/m/infer",
    200,
    10.0,
    11.5,
    "r-1",
    255,
    "127.0.0.1",
    87,
    "team",
    (RUN,),
)


def dropped(registry: MetricsRegistry) -> dict[str, float]:
    return {labels[0]: value for labels, value in registry.counts(ACCESS_LINES_DROPPED).items() if value}


def test_text_line_reads_like_a_log_line() -> None:
    line = text_line(REQUEST, 1e9)
    assert line[19:] == (
        f',500 INFO millstream.access: 127.0.0.1 "POST /v2/models/m/infer" 200 87 bytes 1500.000 ms m:2 rows 4 '
        f"(request r-1, trace {255:032x}, key team)"
    )


def test_json_line_has_the_times_of_the_parts() -> None:
    document = json.loads(json_text("gateway-0")(REQUEST, 1e9))
    assert document["message"] == "POST /v2/models/m/infer 200"
    assert (document["process"], document["request_id"], document["model"]) == ("gateway-0", "r-1", "m")
    assert document["trace_id"] == f"{255:032x}"
    fields = document["fields"]
    assert fields["key"] == "team"
    assert (fields["status"], fields["rows"], fields["batch_requests"]) == (200, 4, 3)
    assert (fields["lane_ms"], fields["queue_ms"], fields["run_ms"]) == (100.0, 100.0, 220.0)


def test_grpc_status_is_named() -> None:
    call = REQUEST._replace(protocol="grpc", method="ModelInfer", path="/s/ModelInfer", status=14, runs=())
    assert '"/s/ModelInfer" UNAVAILABLE' in text_line(call, 0.0)


def test_path_cannot_forge_a_line() -> None:
    forged = REQUEST._replace(path="/a\nFORGED \x1b[31m" + "x" * 2000, runs=())
    for line in (text_line(forged, 0.0), json_text("g")(forged, 0.0)):
        assert "\n" not in line
        assert "\x1b" not in line
        assert len(line) < 1200


def test_lines_are_written_and_rotated(tmp_path: Path) -> None:
    registry = MetricsRegistry(None, "test")
    file = LogFile(tmp_path / "gateway-0-access.log", bytes_max=10_000)
    log = AccessLog(block_writer(file), text_line, registry)
    log.start()
    for number in range(300):
        log.add(REQUEST._replace(request_id=f"r-{number}"))
    log.close()
    file.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"gateway-0-access.log{suffix}" for suffix in ("", ".1", ".2")]
    lines = [line for name in reversed(names) for line in (tmp_path / name).read_text().splitlines()]
    assert [line.partition("(request ")[2].partition(",")[0] for line in lines] == [
        f"r-{number}" for number in range(300)
    ]
    assert dropped(registry) == {}


def test_full_disk_costs_lines_and_no_request() -> None:
    registry = MetricsRegistry(None, "test")
    log = AccessLog(block_writer(LogFile(Path("/dev/full"))), text_line, registry)
    log.start()
    log.add(REQUEST)
    wait_until(lambda: dropped(registry) == {"write_failed": 1.0}, what="the lost line is counted")
    log.close()


def test_buffer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 3)
    registry = MetricsRegistry(None, "test")
    written: list[bytes] = []

    def write(block: bytes) -> bool:
        written.append(block)
        return True

    log = AccessLog(write, text_line, registry)
    for _ in range(5):
        log.add(REQUEST)  # the thread does not run yet
    assert dropped(registry) == {"buffer_full": 2.0}
    log.start()
    log.close()
    assert b"".join(written).count(b"\n") == 3


def test_standard_output_gets_whole_lines(capfd: pytest.CaptureFixture[str]) -> None:
    log = AccessLog(stdout_writer(), json_text("gateway-0"), MetricsRegistry(None, "test"))
    log.start()
    for _ in range(300):
        log.add(REQUEST)
    log.close()
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 300
    assert {json.loads(line)["request_id"] for line in lines} == {"r-1"}


def test_standard_output_on_a_full_disk_loses_lines_and_counts_them() -> None:
    """Not the process of the test: its own standard output stays."""
    program = (
        "from tests.unit.test_access_log import *\n"
        "registry = MetricsRegistry(None, 'test')\n"
        "log = AccessLog(stdout_writer(), text_line, registry)\n"
        "log.start()\n"
        "for _ in range(3): log.add(REQUEST)\n"
        "log.close()\n"
        "assert dropped(registry) == {'write_failed': 3.0}, dropped(registry)\n"
    )
    with Path("/dev/full").open("wb") as full:
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=full, check=True, timeout=120)


def test_times_that_cannot_be_leave_a_line_that_programs_read() -> None:
    header = ReplyHeader("b", "worker-1", math.inf, math.nan, -1.0, 0.0, 3, [3], {}, [], "")
    run = RUN._replace(timing=BatchTiming(header, 10.2, 10.9, 3))
    fields = json.loads(json_text("g")(REQUEST._replace(runs=(run,)), 1e9), parse_constant=pytest.fail)["fields"]
    assert (fields["queue_ms"], fields["run_ms"]) == (1e9, 0.0)
