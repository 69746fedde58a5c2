"""Settings that gateways share, the files of traces, and which lines of a log are shown."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from pathlib import Path

import pytest

from gateway.request import InputTensor, Request
from gateway.shared_document import SharedDocument
from gateway.traces import KEPT_MAX, Sampler, Traces
from gateway.triton import trace_file
from gateway.triton.log import SharedLogSettings
from gateway.triton.trace import SharedTraceSettings
from gateway.triton.trace_file import TraceFile
from services.batch import ReplyHeader
from services.errors import Code, Failure
from services.repository.folder import FolderRepository
from services.trace_values import at_start
from tests.kit.lane_bench import ROW, LaneBench
from tests.kit.responders import NOBODY
from tests.kit.versions import publish


def trace(number: int) -> list[dict[str, object]]:
    return [{"id": number}, {"id": number, "timestamps": []}]


def test_what_one_writes_the_other_reads(tmp_path: Path) -> None:
    mine, other = (SharedDocument(tmp_path / "run" / "x.json") for _ in range(2))
    assert (mine.read(), other.changed()) == ({}, True)
    other.read()
    mine.update(lambda content: content.update(a=1))
    assert (mine.changed(), other.changed()) == (False, True)
    assert other.read() == {"a": 1}
    assert other.read() is other.read()
    other.update(lambda content: content.update(b=2))
    assert mine.read() == {"a": 1, "b": 2}
    with pytest.raises(RuntimeError):
        mine.update(_raise)
    assert other.read() == {"a": 1, "b": 2}
    (tmp_path / "run" / "x.json").write_text("no json")
    assert mine.read() == {}


def _raise(_: object) -> None:
    raise RuntimeError


def test_a_lock_that_stays_held_holds_nobody_up_for_long(tmp_path: Path) -> None:
    document = SharedDocument(tmp_path / "x.json")
    descriptor = os.open(tmp_path / "x.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(Failure) as refused:
        document.update(lambda content: content.update(a=1))
    assert refused.value.code is Code.UNAVAILABLE
    os.close(descriptor)
    document.update(lambda content: content.update(a=1))


def test_a_file_is_a_whole_array_after_each_write(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.json"
    mine, other = TraceFile(path), TraceFile(path)
    for number in range(5):
        (mine, other)[number % 2].write([trace(number)], 0, last=False)
        assert [entry["id"] for entry in json.loads(path.read_text())] == [n for n in range(number + 1) for _ in "ab"]


def test_files_with_an_index_hold_as_many_traces_as_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    mine, other = TraceFile(path), TraceFile(path)
    assert mine.write([trace(number) for number in range(5)], 2, last=False) == [trace(4)]
    assert other.write([trace(9)], 2, last=True) == []
    counts = {file.name: len(json.loads(file.read_text())) for file in tmp_path.iterdir()}
    assert counts == {"t.json.0": 4, "t.json.1": 4, "t.json.2": 2}


def test_files_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(trace_file, "BYTES_MAX", 100)
    monkeypatch.setattr(trace_file, "FILES_MAX", 2)
    file = TraceFile(tmp_path / "t.json")
    for number in range(10):
        file.write([trace(number)], 0, last=False)
        file.write([trace(number)], 1, last=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "t.json.0", "t.json.1"]
    assert (tmp_path / "t.json").stat().st_size <= 102
    assert len([record for record in caplog.records if "is full" in record.message]) == 1


def test_a_folder_that_cannot_be_written_costs_the_traces_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert TraceFile(tmp_path / "file" / "t.json").write([trace(1)], 0, last=False) == ()
    assert "could not be written" in caplog.text


def requests(number: int, *, counted: bool = True) -> list[Request]:
    made = [Request([InputTensor((1, 4), ROW, 16)], 1, 0, 0.0, 1.0, NOBODY) for _ in range(number)]
    for request in made:
        request.counted = counted
    return made


def test_every_so_many_th_request_is_due_and_canaries_are_not_counted() -> None:
    sampler = Sampler(3, False, lambda wanted: wanted)
    assert [sampler.due(requests(number)) for number in (2, 1, 7)] == [[], [0], [2, 5]]
    assert sampler.due(requests(5, counted=False)) == []
    assert sampler.due(requests(2)) == [1]
    assert Sampler(1, False, lambda _: 2).due(requests(5)) == [0, 1]


def header(runs: int) -> ReplyHeader:
    return ReplyHeader("b", "w", 0.1, 0.2, 0.3, 0.1, runs, [runs], {}, [], "")


def test_a_trace_says_when_what_began(tmp_path: Path) -> None:
    manifest = publish(FolderRepository(tmp_path), "m", 1)
    traces = Traces()
    traces.sampler = lambda _: Sampler(1, True, lambda wanted: wanted)
    traces.record(manifest, requests(1), [None], 2.0, header(1), 3.0)
    [(model, entries)] = traces.kept
    assert (model, entries[0]["model_name"], entries[0]["model_version"]) == ("m", "m", 1)
    at = {point["name"]: round(point["ns"] / 1e9, 6) for point in entries[1]["timestamps"]}
    assert at == {
        "REQUEST_START": 0.0,
        "QUEUE_START": 0.0,
        "COMPUTE_START": 2.1,
        "COMPUTE_INPUT_END": 2.3,
        "COMPUTE_OUTPUT_START": 2.6,
        "COMPUTE_END": 2.7,
        "REQUEST_END": 3.0,
    }
    assert [entry["tensor"]["name"] for entry in entries[2:]] == ["x"]  # it failed: there is no output


def test_traces_that_nobody_writes_have_a_limit(tmp_path: Path) -> None:
    manifest = publish(FolderRepository(tmp_path), "m", 1)
    traces = Traces()
    sampler = Sampler(1, False, lambda wanted: wanted)
    traces.sampler = lambda _: sampler
    for _ in range(KEPT_MAX + 5):
        traces.record(manifest, requests(1), [None], 0.0, header(1), 1.0)
    assert (len(traces.kept), traces.lost) == (KEPT_MAX, 5)


def test_a_count_is_that_of_all_gateways_together(tmp_path: Path) -> None:
    def gateway() -> tuple[SharedTraceSettings, Traces]:
        traces = Traces()
        return SharedTraceSettings(
            SharedDocument(tmp_path / "s.json"), traces, tmp_path / "t", lambda: ["m", "n"], {}
        ), traces

    (mine, here), (other, there) = gateway(), gateway()
    mine.update("m", {"trace_level": ["TIMESTAMPS"], "trace_rate": 1, "trace_count": "3"})
    assert other.get("m")["trace_rate"] == "1"  # whoever is shown a setting finds it in force
    assert here.on
    assert there.on
    manifest = publish(FolderRepository(tmp_path), "m", 1)
    for traces in (here, there, here, there):
        traces.record(manifest, requests(1), [None], 0.0, header(1), 1.0)
    assert len(here.kept) + len(there.kept) == 3
    assert other.get("m")["trace_count"] == "0"
    assert there.sampler("m") is None
    other.update("m", {"trace_level": None})
    assert not there.on


def test_settings_from_the_start_hold_until_they_are_changed_and_again_when_they_are_cleared(tmp_path: Path) -> None:
    traces = Traces()
    start = at_start("level=TIMESTAMPS, level=TENSORS,rate=1,count=2,log-frequency=0")
    settings = SharedTraceSettings(SharedDocument(tmp_path / "s.json"), traces, tmp_path / "t", lambda: ["m"], start)
    assert settings.get(None)["trace_level"] == ["TIMESTAMPS", "TENSORS"]
    manifest = publish(FolderRepository(tmp_path), "m", 1)
    for _ in range(3):
        traces.record(manifest, requests(1), [None], 0.0, header(1), 1.0)
    assert len(traces.kept) == 2, "the count of the start counts"
    assert settings.update(None, {"trace_level": "OFF"})["trace_level"] == ["OFF"]
    assert traces.on is False
    assert settings.update(None, {"trace_level": None, "trace_count": None})["trace_count"] == "2"
    assert settings.get(None)["trace_level"] == ["TIMESTAMPS", "TENSORS"]


@pytest.mark.parametrize("text", ["level", "level=LOUD", "rate=0", "rate=x", "speed=1", "level=OFF,level=TENSORS"])
def test_a_start_setting_that_is_none_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(Failure):
        at_start(text)


def test_a_lane_traces_only_while_something_is_traced(tmp_path: Path) -> None:
    bench = LaneBench(tmp_path, {1: 0.01})
    traces = bench.shared.traces
    traces.sampler = lambda _: Sampler(1, True, lambda wanted: wanted)
    for traced in (False, True):
        traces.on = traced
        bench.come(1)
        bench.answer()
        assert len(traces.kept) == traced
    [(_, entries)] = traces.kept
    assert [entry["tensor"]["name"] for entry in entries[2:]] == ["x", "y"]
    traces.kept.clear()
    bench.come(1)
    bench.answer(failures={0: [Code.MODEL.value, "no"]})
    assert len(traces.kept[0][1]) == 2  # the request's tensors were let go when it failed


def test_levels_are_shown_as_set(tmp_path: Path) -> None:
    handler = logging.Handler()
    settings = SharedLogSettings(SharedDocument(tmp_path / "l.json"), [handler])

    def shown() -> list[str]:
        levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
        makes = [logging.LogRecord("x", getattr(logging, level), "", 0, "", None, None) for level in levels]
        return [record.levelname for record in makes if handler.filter(record)]

    try:
        assert shown() == ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
        settings.update({"log_info": False, "log_error": False})
        assert shown() == ["DEBUG", "WARNING"]
        settings.update({"log_verbose_level": 2})
        assert logging.getLogger("millrace").level == logging.DEBUG
    finally:
        settings.update({"log_verbose_level": 0})
        settings.close()
    assert logging.getLogger("millrace").level == logging.NOTSET
