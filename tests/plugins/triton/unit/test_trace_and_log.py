"""Settings that gateways share, the files of traces, and which lines of a log are shown."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream.plugins.compat.triton.trace
from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.inputs import InputTensor
from millstream.plugins.compat.triton import shared_settings, trace_file
from millstream.plugins.compat.triton.log import SharedLogSettings
from millstream.plugins.compat.triton.shared_settings import Locked, SharedDocument, when_unlocked
from millstream.plugins.compat.triton.trace import SharedTraceSettings
from millstream.plugins.compat.triton.trace_file import TraceFile
from millstream.plugins.compat.triton.traces import (
    ELEMENTS_BYTES_MAX,
    ELEMENTS_MAX,
    KEPT_BYTES_MAX,
    KEPT_MAX,
    Sampler,
    Traces,
    text_bytes_max,
)
from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import encode_elements
from millstream.services.model.manifest import Manifest
from millstream.services.model.signature import TensorSpec
from millstream.services.process.log_level import LogLevel
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.batch import ReplyHeader
from tests.kit.disk import small_disk
from tests.kit.lane_harness import ROW, LaneBench
from tests.kit.responders import DISCARD
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


@pytest.mark.anyio
async def test_a_lock_that_stays_held_holds_nobody_up_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_settings, "LOCK_S_MAX", 0.2)
    document = SharedDocument(tmp_path / "x.json")
    descriptor = os.open(tmp_path / "x.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    for wait_s in (0.0, 0.2):
        with pytest.raises(Locked):
            document.update(lambda content: content.update(a=1), wait_s)
    with pytest.raises(Failure, match="continue or restart it") as refused:
        await when_unlocked(lambda: document.update(lambda content: content.update(a=1)))
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


def test_files_are_bounded_in_size_and_number_and_the_newest_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "BYTES_MAX", 200)
    monkeypatch.setattr(trace_file, "FILES_MAX", 2)
    gateways = TraceFile(tmp_path / "t.json"), TraceFile(tmp_path / "t.json")
    for number in range(100):
        for file in gateways:
            file.write([trace(number)], 0, last=False)
            file.write([trace(number)], 1, last=False)
    kept = {path.name: [entry["id"] for entry in json.loads(path.read_text())] for path in tmp_path.iterdir()}
    assert kept.pop("t.json.198") == kept.pop("t.json.199") == [99, 99]
    assert sorted(kept) == ["t.json", "t.json.old.1", "t.json.old.2", "t.json.old.3"]
    assert all((tmp_path / name).stat().st_size <= 202 for name in kept)
    ids = [one for name in sorted(kept, reverse=True) for one in kept[name]]
    assert ids[-1] == 99
    assert ids == sorted(ids)
    assert TraceFile(tmp_path / "t.json").write([trace(5)], 1, last=False) == []
    assert (tmp_path / "t.json.200").exists()  # after a restart too


def test_files_with_an_index_are_bounded_in_bytes_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TraceFile(tmp_path / "t.json")
    file.write([trace(0)], 1, last=False)
    monkeypatch.setattr(trace_file, "FILES_BYTES_MAX", 3 * (tmp_path / "t.json.0").stat().st_size)
    for number in range(1, 10):
        file.write([trace(number)], 1, last=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json.7", "t.json.8", "t.json.9"]


@pytest.mark.needs("tmpfs")
def test_a_full_disk_costs_the_traces_that_come_and_none_that_are_there(caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(1 << 20) as disk:
        folder = disk.seen(disk.folder) / "traces"
        file = TraceFile(folder / "t.json")
        file.write([trace(1)], 0, last=False)
        file.write([trace(1)], 1, last=False)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        disk.fill()
        many = [trace(number) for number in range(1000)]  # a part of them would find room in the last page
        assert file.write(many, 0, last=False) == ()
        assert file.write(many, 1000, last=False) == ()
        assert caplog.text.count("could not be written") == 2
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        disk.empty()
        file.write([trace(2)], 0, last=False)
        assert [entry["id"] for entry in json.loads((folder / "t.json").read_text())] == [1, 1, 2, 2]
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_a_folder_that_cannot_be_written_costs_the_traces_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert TraceFile(tmp_path / "file" / "t.json").write([trace(1)], 0, last=False) == ()
    assert "could not be written" in caplog.text


def requests(number: int, *, counted: bool = True) -> list[Request]:
    made = [Request([InputTensor((1, 4), ROW, 16)], 1, 0, 0.0, 1.0, DISCARD) for _ in range(number)]
    for request in made:
        request.counted = counted
    return made


def due(sampler: Sampler, given: list[Request]) -> list[int]:
    return [given.index(request) for request in sampler.due(given)]


def test_every_so_many_th_request_is_due_and_canaries_are_not_counted() -> None:
    sampler = Sampler(3, False, lambda wanted: wanted)
    assert [due(sampler, requests(number)) for number in (2, 1, 7)] == [[], [0], [2, 5]]
    assert due(sampler, requests(5, counted=False)) == []
    assert due(sampler, requests(2)) == [1]
    assert due(Sampler(1, False, lambda _: 2), requests(5)) == [0, 1]


def header(runs: int) -> ReplyHeader:
    return ReplyHeader("b", "w", 0.1, 0.2, 0.3, 0.1, runs, [runs], {}, [], "")


def test_a_trace_says_when_what_began(tmp_path: Path) -> None:
    manifest = publish(FolderRepository(tmp_path), "m", 1)
    traces = Traces()
    traces.sampler = lambda _: Sampler(1, True, lambda wanted: wanted)
    traces.record(manifest, requests(1), {}, header(1), 2.0, 3.0)
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
        traces.record(manifest, requests(1), {}, header(1), 0.0, 1.0)
    assert (len(traces.kept), traces.lost) == (KEPT_MAX, 5)


class Named(Request):
    name = ""

    @property
    def id(self) -> str:
        return self.name


def traced(manifest: Manifest, inputs: list[InputTensor], request_id: str = "") -> Traces:
    """Traces of as many requests as fit."""
    traces = Traces()
    traces.sampler = lambda _: Sampler(1, True, lambda wanted: wanted)
    request = Named(inputs, 1, 0, 0.0, 1.0, DISCARD)
    request.name = request_id
    while not traces.lost:
        traces.record(manifest, [request], {}, header(1), 0.0, 1.0)
    return traces


def with_inputs(manifest: Manifest, inputs: tuple[TensorSpec, ...]) -> Manifest:
    signature = manifest.signature.model_copy(update={"inputs": inputs})
    return manifest.model_copy(update={"signature": signature})


async def written(settings: SharedTraceSettings) -> None:
    settings.flush()
    assert settings._writing is not None
    await settings._writing


LARGEST = {
    "FP32": InputTensor((1, ELEMENTS_MAX), np.full(ELEMENTS_MAX, -1.2345678e-38, np.float32), 4 * ELEMENTS_MAX),
    "UINT8": InputTensor((1, ELEMENTS_MAX), bytes(ELEMENTS_MAX), ELEMENTS_MAX),
    "BOOL": InputTensor((1, ELEMENTS_MAX), np.zeros(ELEMENTS_MAX, bool), ELEMENTS_MAX),
    "BYTES": InputTensor((1, 1), encode_elements([b"\x01" * (ELEMENTS_BYTES_MAX - 4)]), ELEMENTS_BYTES_MAX),
}


@pytest.mark.parametrize("datatype", LARGEST)
def test_traces_that_wait_are_bounded_in_bytes(tmp_path: Path, datatype: str) -> None:
    """Of the text that they become, whatever is in them."""
    manifest = publish(FolderRepository(tmp_path / "repository"), "m", 1)
    spec = manifest.signature.inputs[0].model_copy(update={"datatype": datatype})
    traces = traced(with_inputs(manifest, (spec,)), [LARGEST[datatype]])
    assert 1 < len(traces.kept) < KEPT_MAX
    TraceFile(tmp_path / "t.json").write([entry for _, entry in traces.kept], 0, last=True)
    assert (tmp_path / "t.json").stat().st_size <= KEPT_BYTES_MAX
    assert all(len(entries[2]["tensor"]["data"]) for entries in _entries(tmp_path / "t.json"))
    assert traces.take()
    traces.record(manifest, requests(1), {}, header(1), 0.0, 1.0)
    assert len(traces.kept) == 1  # there is room again


def _entries(path: Path) -> list[list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for entry in json.loads(path.read_text()):
        found.setdefault(entry["id"], []).append(entry)
    return list(found.values())


def test_of_larger_tensors_and_of_too_many_the_shape_alone_is_told(tmp_path: Path) -> None:
    manifest = publish(FolderRepository(tmp_path), "m", 1)
    [spec] = manifest.signature.inputs
    large = InputTensor((1, ELEMENTS_MAX + 1), bytes(4 * ELEMENTS_MAX + 4), 4 * ELEMENTS_MAX + 4)
    trace = traced(with_inputs(manifest, (spec,) * 101), [large, *[LARGEST["FP32"]] * 100]).kept[0][1]
    data = [entry["tensor"]["data"] for entry in trace[2:]]
    assert data[0] == ""
    shown = [one for one in data if one != ""]
    assert 10 < len(shown) < 100
    assert text_bytes_max(trace) <= KEPT_BYTES_MAX


def test_a_request_with_an_endless_id_is_not_traced(tmp_path: Path) -> None:
    manifest = publish(FolderRepository(tmp_path), "m", 1)
    assert traced(manifest, [InputTensor((1, 4), ROW, 16)], "x" * KEPT_BYTES_MAX).kept == []


@pytest.mark.anyio
async def test_traces_that_wait_for_others_are_written_before_they_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log frequency that is never reached keeps them in memory; those of many models add up."""
    monkeypatch.setattr(millstream.plugins.compat.triton.trace, "KEPT_MAX", 10)
    traces, path = Traces(), tmp_path / "t.json"
    models = [f"m{number}" for number in range(6)]
    settings = SharedTraceSettings(SharedDocument(tmp_path / "s.json"), traces, path, lambda: models)
    for number, model in enumerate(models):
        terms = {"trace_level": "TIMESTAMPS", "trace_rate": 1, "log_frequency": 1000 + number}
        settings.update(model, terms)
        manifest = publish(FolderRepository(tmp_path / "repository"), model, 1)
        traces.record(manifest, requests(2), {}, header(1), 0.0, 1.0)
        await written(settings)
        # written when the settings changed, or because they were too many
        kept = [json.loads(file.read_text()) for file in tmp_path.glob("t.json.*")]
        assert sum(map(len, kept)) // 2 + 10 >= 2 * (number + 1)
    for _ in range(8):
        traces.record(manifest, requests(2), {}, header(1), 0.0, 1.0)
        await written(settings)
    number = sum(len(json.loads(file.read_text())) for file in tmp_path.glob("t.json.*")) // 2
    assert number >= 2 * 14 - 10


def test_a_count_is_that_of_all_gateways_together(tmp_path: Path) -> None:
    def gateway() -> tuple[SharedTraceSettings, Traces]:
        traces = Traces()
        return SharedTraceSettings(
            SharedDocument(tmp_path / "s.json"), traces, tmp_path / "t", lambda: ["m", "n"]
        ), traces

    (mine, here), (other, there) = gateway(), gateway()
    mine.update("m", {"trace_level": ["TIMESTAMPS"], "trace_rate": 1, "trace_count": "3"})
    assert other.get("m")["trace_rate"] == "1"  # a setting that is shown is in force
    assert here.on
    assert there.on
    manifest = publish(FolderRepository(tmp_path), "m", 1)
    for traces in (here, there, here, there):
        traces.record(manifest, requests(1), {}, header(1), 0.0, 1.0)
    assert len(here.kept) + len(there.kept) == 3
    assert other.get("m")["trace_count"] == "0"
    assert there.sampler("m") is None
    other.update("m", {"trace_level": None})
    assert not there.on


def test_a_lane_traces_only_while_something_is_traced(tmp_path: Path) -> None:
    bench = LaneBench(tmp_path, {1: 0.01})
    traces = Traces()
    bench.shared = replace(bench.shared, recorders=(traces,))
    bench.lane = bench.another("n", {1: 0.01})
    traces.sampler = lambda _: Sampler(1, True, lambda wanted: wanted)
    for traced in (False, True):
        traces.on = traced
        bench.add_requests(1)
        bench.answer()
        assert len(traces.kept) == traced
    [(_, entries)] = traces.kept
    assert [entry["tensor"]["name"] for entry in entries[2:]] == ["x", "y"]
    traces.kept.clear()
    bench.add_requests(1)
    bench.answer(failures={0: [Code.MODEL.value, "no"]})
    assert len(traces.kept[0][1]) == 2  # the request's tensors were let go when it failed


def test_levels_are_shown_as_set(tmp_path: Path) -> None:
    handler = logging.Handler()
    level = LogLevel("gateway", tmp_path / "levels.json", lambda: None)
    settings = SharedLogSettings(SharedDocument(tmp_path / "l.json"), level.set_verbose)
    settings.start([handler])

    def shown() -> list[str]:
        levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
        makes = [logging.LogRecord("x", getattr(logging, level), "", 0, "", None, None) for level in levels]
        return [record.levelname for record in makes if handler.filter(record)]

    try:
        assert shown() == ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
        settings.update({"log_info": False, "log_error": False})
        assert shown() == ["DEBUG", "WARNING"]
        settings.update({"log_verbose_level": 2})
        assert logging.getLogger("millstream").level == logging.DEBUG
    finally:
        settings.update({"log_verbose_level": 0})
        settings.stop()
    assert logging.getLogger("millstream").level == logging.NOTSET
