"""python -m millstream.plugins.compile.worker with real processes: verdicts, samples, cache, hostile candidates."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from millstream.plugins.compile.candidate import Candidate, Compiled, CompileOutcome, Missing, Subject
from millstream.plugins.compile.race.bounds import Guard
from millstream.plugins.compile.race.report import SIZES, RaceEvent, RaceReport, RaceTask, Row
from millstream.plugins.compile.race.samples import write_samples
from millstream.plugins.compile.targets import get_target
from millstream.plugins.compile.targets.base import Target
from millstream.plugins.compile.worker import driver, track
from millstream.plugins.compile.worker.compiled_cache import NEW, CompiledCache, working
from millstream.plugins.compile.worker.track import LateError
from millstream.services.errors import Failure
from millstream.services.process.threads import NICE
from tests.kit import models
from tests.kit.races import MLP, RaceProcess, kill, race_task, signature
from tests.kit.stack import descendants
from tests.kit.wait import wait_until

COPYING = signature([("x", "FP32", (-1, 16))], [("y", "FP32", (-1, 16))])
BASELINE_S = 0.01  # of a simulated run
LONG_S = 0.1  # of one that is compared: its differences outweigh the delays of a busy machine


def simulated(folder: Path, behaviour: dict[str, Any] | None = None, **more: Any) -> RaceTask:
    """Return a task for a version of the simulated backend."""
    content = json.dumps(behaviour or {"run_s": BASELINE_S}).encode()
    return race_task(folder, content, COPYING, backend="simulated", targets=(), **more)


class Prepared(Target):
    """A target whose candidates are compiled before the race: each is a file of the simulated backend."""

    name = "prepared"
    backend = "simulated"
    missing: Missing | None = None

    def __init__(self, task: RaceTask, behaviours: Sequence[dict[str, Any]], *, lossy: bool = False) -> None:
        self.lossy = lossy
        self.found = [Candidate(target=self.name, flags={"at": at}, lossy=lossy) for at in range(len(behaviours))]
        for candidate, behaviour in zip(self.found, behaviours, strict=True):
            keep(task, candidate, json.dumps(behaviour).encode(), "simulated")

    def available(self, device: str) -> Missing | None:
        return self.missing

    def candidates(self, subject: Subject) -> Sequence[Candidate]:
        return self.found

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        raise AssertionError("it is compiled before the race")


def keep(task: RaceTask, candidate: Candidate, content: bytes, backend: str) -> None:
    """Put a compiled candidate into the cache of a task."""
    with working(task.cache) as folder:
        (inner := folder / "candidate").mkdir()
        (inner / "model").write_bytes(content)
        compiled = Compiled(files=("model",), backend=backend, runtime="none")
        CompiledCache(task, "").keep(candidate, inner, CompileOutcome(compiled=compiled, seconds=1.5, size_bytes=7))


@pytest.fixture
def events() -> list[RaceEvent]:
    return []


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, events: list[RaceEvent]) -> Iterator[Any]:
    def run(behaviours: Sequence[dict[str, Any]], **more: Any) -> RaceReport:
        task = simulated(tmp_path, **more)
        monkeypatch.setattr(driver, "TARGETS", [Prepared(task, behaviours)])
        report = driver.run_race(task, events.append)
        assert not list(task.cache.glob(f"{NEW}*"))
        return report

    yield run


def row(report: RaceReport, at: int) -> Row:
    found = report.row(Candidate(target="prepared", flags={"at": at}, lossy=False).key)
    assert found is not None
    return found


def test_the_fastest_wins_and_the_report_names_the_losers(race: Any, events: list[RaceEvent]) -> None:
    behaviours = [{"run_s": LONG_S / 2}, {"run_s": LONG_S / 8}, {"run_s": LONG_S * 3}]
    report = race(behaviours, behaviour={"run_s": LONG_S})
    assert report.winner == row(report, 1).candidate
    assert set(report.table.values()) == {report.winner}
    assert report.ratio > 2
    assert [row(report, at).verdict for at in range(3)] == ["lost", "won", "lost"]
    best = row(report, 1)
    assert best.ratio == report.ratio
    assert set(best.ratios) == set(SIZES) == set(report.baseline_s)
    assert (best.cached, best.compile_s, best.size_bytes) == (True, 1.5, 7)
    assert (report.samples, report.device) == ("random", "cpu")
    assert "RANDOM" in report.notes[0]
    assert {event.stage for event in events} == {"starting", "compiling", "judging", "measuring"}
    assert row(report, 2).rounds < best.rounds, "it is slower, which a few rounds show"


def test_candidates_that_crash_hang_fail_or_hunger_lose_alone(race: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track, "LOAD_S", 5.0)
    monkeypatch.setattr(track, "SLOWER_MAX", 2.0)
    misbehaving: list[dict[str, Any]] = [
        {"load": "crash"},
        {"load": "hang"},
        {"load": "fail"},
        {"rows_fitting": 2},
        {"bytes": 1 << 30, "allocate": True},
    ]
    report = race([*misbehaving, {"run_s": 0}], memory_bytes=300 << 20)
    assert report.winner == row(report, 5).candidate
    assert [row(report, at).verdict for at in range(5)] == ["failed"] * 5
    reasons = [row(report, at).why for at in range(5)]
    assert "SIGABRT" in reasons[0]
    assert "was not loaded within" in reasons[1]
    assert "no memory for" in reasons[3]
    assert "memory" in reasons[4].lower()
    assert {row(report, at).compiled for at in range(5)} == {None}


def test_nothing_changes_where_nothing_is_faster(race: Any) -> None:
    report = race([{"run_s": BASELINE_S * 2}])
    assert (report.winner, report.table, report.ratio) == (None, {}, 1.0)
    assert "times as fast" in report.why


def test_a_crashing_candidate_of_a_real_library_keeps_its_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = race_task(tmp_path, targets=())
    target = Prepared(task, [])
    target.found = [Candidate(target="prepared", flags={"at": at}, lossy=False) for at in range(2)]
    other = models.mlp(tmp_path / "other.onnx").read_bytes()
    keep(task, target.found[0], other[: len(other) // 2], "onnxruntime")
    keep(task, target.found[1], models.identity(tmp_path / "identity.onnx").read_bytes(), "onnxruntime")
    monkeypatch.setattr(driver, "TARGETS", [target])
    report = driver.run_race(task, lambda _: None)
    assert row(report, 0).verdict == "failed"
    assert "cannot be loaded" in row(report, 0).why
    assert row(report, 1).verdict == "failed"


def test_wrong_answers_are_refused_with_the_output_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    square = signature([("x", "FP32", (-1, 2))], [("y", "FP32", (-1, 2))])
    task = race_task(tmp_path, models.scale(tmp_path / "scale.onnx").read_bytes(), square, targets=())
    target = Prepared(task, [])
    target.found = [Candidate(target="prepared", flags={"at": at}, lossy=False) for at in range(2)]
    for candidate, factor in zip(target.found, (-2.0, 2.0), strict=True):
        content = models.scale(tmp_path / f"{factor}.onnx", factor).read_bytes()
        keep(task, candidate, content, "onnxruntime")
    monkeypatch.setattr(driver, "TARGETS", [target])
    report = driver.run_race(task, lambda _: None)
    wrong, right = row(report, 0), row(report, 1)
    assert (wrong.verdict, wrong.compiled) == ("inaccurate", None)
    assert wrong.why.startswith("output 'y': the cosine is -1.00000")
    assert wrong.cosine_min == pytest.approx(-1)
    assert right.verdict in {"won", "lost"}
    assert right.cosine_min == pytest.approx(1)


def test_rows_that_influence_each_other_serve_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    square = signature([("x", "FP32", (-1, 4))], [("y", "FP32", (-1, 4))])
    task = race_task(tmp_path, models.identity(tmp_path / "i.onnx", "FP32", ("N", 4)).read_bytes(), square, targets=())
    target = Prepared(task, [])
    target.found = [Candidate(target="prepared", flags={"at": 0}, lossy=False)]
    keep(task, target.found[0], centred(), "onnxruntime")
    monkeypatch.setattr(driver, "TARGETS", [target])
    report = driver.run_race(task, lambda _: None)
    assert row(report, 0).single
    assert all(rows == 1 for rows in row(report, 0).ratios)


def centred() -> bytes:
    """Return a model that is the identity of a single row, and adds the rows' mean less the row's own share else."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1),
        helper.make_node("Mul", ["mean", "half"], ["part"]),
        helper.make_node("Mul", ["x", "half"], ["rest"]),
        helper.make_node("Add", ["part", "rest"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in "xy"]
    half = helper.make_tensor("half", TensorProto.FLOAT, [1], [0.5])
    return _serialized(nodes, *ends, half)


def test_lossy_candidates_need_real_samples_or_consent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = simulated(tmp_path)
    target = Prepared(task, [{"run_s": 0}], lossy=True)
    monkeypatch.setattr(driver, "TARGETS", [target])
    [skipped] = driver.run_race(task, lambda _: None).rows
    assert skipped.verdict == "skipped"
    assert "let it accept random ones" in skipped.why
    consented = task.model_copy(update={"accept_random_samples": True})
    [raced] = driver.run_race(consented, lambda _: None).rows
    assert raced.verdict == "failed"  # it is compiled anew, with samples, and no such target is known there
    assert "unknown target" in raced.why


def test_a_target_that_is_missing_says_what_to_install(race: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prepared, "missing", Missing("no such library", "pip install it"))
    [missing] = race([]).rows
    assert (missing.verdict, missing.why) == ("unavailable", "no such library; pip install it")


def test_one_candidate_of_a_report_can_race_alone(tmp_path: Path) -> None:
    task = race_task(tmp_path, targets=("onnxruntime", "onnxruntime-int8-dynamic"), accept_random_samples=True)
    dynamic = next(one for one in driver.run_race(task, lambda _: None).rows if one.target != "onnxruntime")
    alone = task.model_copy(update={"targets": ("openvino", dynamic.candidate)})
    found = {one.target: one.candidate for one in driver.run_race(alone, lambda _: None).rows}
    assert found.keys() == {"openvino", dynamic.target}
    assert found[dynamic.target] == dynamic.candidate
    with pytest.raises(Failure, match="unknown target 'glow-01234567'"):
        driver.run_race(task.model_copy(update={"targets": ("glow-01234567",)}), lambda _: None)


def test_what_serves_takes_part_in_a_race_of_other_candidates(tmp_path: Path) -> None:
    """Else repeating the row of a loser would end what serves. Its consent was given."""
    subject = Subject(path=models.mlp(tmp_path / "mlp.onnx"), source_format="onnx", signature=MLP)
    [dynamic, *_] = get_target("onnxruntime-int8-dynamic").candidates(subject)
    task = race_task(tmp_path, serving=(dynamic.key, "glow-01234567"))
    report = driver.run_race(task, lambda _: None)
    assert {row.target for row in report.rows} == {"onnxruntime", dynamic.target}
    served = report.row(dynamic.key)
    assert served is not None
    assert served.verdict not in {"skipped", "unavailable"}
    assert "RANDOM" in " ".join(report.notes)


def test_a_candidate_that_answers_too_slowly_is_not_waited_for(race: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track, "SLOWER_MAX", 1.0)
    monkeypatch.setattr(track, "SLOW_S", 1.5)
    report = race([{"run_s": 60.0}])
    assert row(report, 0).verdict == "failed"
    assert "did not answer the samples within" in row(report, 0).why


def test_the_process_prints_progress_and_a_report_and_compiles_nothing_twice(tmp_path: Path) -> None:
    task = race_task(tmp_path)
    first = RaceProcess(task).report()
    assert first.rows
    assert not any(one.cached for one in first.rows)
    again = RaceProcess(task).report()
    assert all(one.cached for one in again.rows)
    for one in again.rows:
        assert one.compiled is not None
        assert (task.cache / one.folder).is_dir()


def test_a_damaged_compiled_form_is_made_again(tmp_path: Path) -> None:
    task = race_task(tmp_path)
    [one, *_] = driver.run_race(task, lambda _: None).rows
    (task.cache / one.folder / "compiled.json").write_text("{")
    again = driver.run_race(task, lambda _: None).row(one.candidate)
    assert again is not None
    assert not again.cached


@pytest.mark.parametrize("stage", ["starting", "compiling", "judging", "measuring"])
def test_a_race_that_is_killed_leaves_no_process_and_goes_on_in_the_next_one(tmp_path: Path, stage: str) -> None:
    task = race_task(tmp_path)
    race = RaceProcess(task)
    race.until(stage)
    children = descendants(race.process.pid)
    race.kill()
    for child in children:
        wait_until_gone(child)
    report = RaceProcess(task).report()
    assert report.rows
    assert not list(task.cache.glob(f"{NEW}*"))
    if stage == "measuring":
        assert all(one.cached for one in report.rows[:1])


def test_a_form_that_is_wrong_where_no_sample_looks_never_serves_there(tmp_path: Path) -> None:
    """OpenVINO multiplies INT64 in 32 bits, and makes 0 of NaN before a Relu."""
    hours = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (int64[N] t) => (float[N, 8] y)'
        " <int64 k = {1000}, int64 hour = {3600000}, int64 day = {24}>"
        " { m = Mul(t, k)  h = Div(m, hour)  d = Mod(h, day)  y = Gather(table, d) }"
    )
    table = np.random.default_rng(0).standard_normal((24, 8)).astype(np.float32)
    hours.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    seconds = signature([("t", "INT64", (-1,))], [("y", "FP32", (-1, 8))])
    task = race_task(tmp_path / "hours", hours.SerializeToString(), seconds, targets=("openvino",))
    [row] = driver.run_race(task, lambda _: None).rows
    assert row.verdict == "failed"
    assert "integers of 't' at Mul (which computes 'm') may be larger" in row.why
    report = driver.run_race(race_task(tmp_path / "mlp", targets=("openvino",)), lambda _: None)
    [row] = report.rows
    assert row.verdict in {"won", "lost"}, row.why
    guard = Guard(row.bounds, MLP)
    inputs = {"input": np.ones((16, 64), np.float32)}
    assert guard.admits(inputs)
    for odd in (np.nan, np.inf, -np.inf):
        inputs["input"][7, 7] = odd
        assert not guard.admits(inputs)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="policies of Linux")
@pytest.mark.parametrize("share", [False, True])
def test_the_race_and_its_processes_take_only_the_time_that_others_leave_or_a_share(
    tmp_path: Path, share: bool
) -> None:
    level = NICE if share else 19
    # It has only the time that the other tests leave, so no limit of its own may end it before it is looked at.
    race = RaceProcess(race_task(tmp_path, share=share), lowered=True)
    try:
        started = wait_until(lambda: descendants(race.process.pid), 250, what="the race started a process")
        for pid in (race.process.pid, *started):
            assert os.sched_getscheduler(pid) == (os.SCHED_OTHER if share else os.SCHED_IDLE)
            assert os.getpriority(os.PRIO_PROCESS, pid) == level
        assert all(os.getsid(pid) == race.process.pid for pid in started)
        session = os.getsid(race.process.pid)
        assert session == race.process.pid
        group = Path(f"/proc/{session}/autogroup")
        if group.exists() and (text := group.read_text()):
            assert text.split()[-1] == str(level)
    finally:
        race.kill()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="policies of Linux")
def test_a_race_with_a_share_reaches_a_verdict_though_all_processors_are_busy(tmp_path: Path) -> None:
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        task = race_task(tmp_path, share=True, threads=2)
        report = RaceProcess(task, lowered=True).report()
    finally:
        kill([one.pid for one in busy])
        for one in busy:
            one.wait()
    assert {row.verdict for row in report.rows} <= {"won", "lost"}
    assert report.seconds < task.seconds_max / 4, "it ended by itself"


def test_token_ids_stay_within_the_embedding(tmp_path: Path) -> None:
    ids = signature([("ids", "INT64", (-1, 1))], [("y", "FP32", (-1, 1, 3))])
    report = driver.run_race(race_task(tmp_path, embedding(50), ids), lambda _: None)
    assert report.samples == "random"
    assert all(row.verdict in {"won", "lost"} for row in report.rows)


def embedding(words: int) -> bytes:
    """Return a model that looks rows of 3 numbers up: "ids" INT64 [N, 1] -> "y" FP32 [N, 1, 3]."""
    table = np.random.default_rng(0).standard_normal((words, 3)).astype(np.float32)
    return _serialized(
        [helper.make_node("Gather", ["table", "ids"], ["y"])],
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", 1]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 1, 3]),
        onnx.numpy_helper.from_array(table, "table"),
    )


def test_a_version_that_answers_at_random_is_said_to(tmp_path: Path) -> None:
    square = signature([("x", "FP32", (-1, 10))], [("y", "FP32", (-1, 10))])
    content = _serialized(
        [
            helper.make_node("RandomNormalLike", ["x"], ["noise"]),
            helper.make_node("Add", ["x", "noise"], ["y"]),
        ],
        *(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 10]) for name in "xy"),
    )
    report = driver.run_race(race_task(tmp_path, content, square), lambda _: None)
    assert "differently from run to run" in report.notes[-1]
    assert report.winner is None


def _serialized(
    nodes: list[onnx.NodeProto], given: onnx.ValueInfoProto, answer: onnx.ValueInfoProto, *weights: onnx.TensorProto
) -> bytes:
    graph = helper.make_graph(nodes, "test", [given], [answer], list(weights))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def test_a_baseline_that_dies_once_is_loaded_again(tmp_path: Path) -> None:
    task = race_task(tmp_path)
    killed: list[int] = []
    others = set(descendants(os.getpid()))  # of other tests, such as a stack that the session shares

    def tell(event: RaceEvent) -> None:
        if event.stage == "measuring" and not killed:
            [baseline, *_] = sorted(set(descendants(os.getpid())) - others)
            killed.append(baseline)
            os.kill(baseline, 9)

    report = driver.run_race(task, tell)
    assert killed
    assert any(row.rounds >= 5 for row in report.rows)


def wait_until_gone(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 120)[0], f"process {pid} is still there"
    finally:
        os.close(descriptor)


def test_uploaded_samples_are_used_and_part_of_them_is_held_out(tmp_path: Path) -> None:
    samples = tmp_path / "samples.npz"
    write_samples(samples, {"input": np.random.default_rng(1).random((20, 64), np.float32)})
    report = driver.run_race(race_task(tmp_path, samples=samples), lambda _: None)
    assert report.samples == "uploaded"
    assert not report.notes


def test_samples_of_the_import_are_used_where_none_are_sent(tmp_path: Path) -> None:
    task = race_task(tmp_path)
    (task.folder / "imported").mkdir()
    write_samples(task.folder / "imported/samples.npz", {"input": np.ones((1, 64), np.float32)})
    report = driver.run_race(task, lambda _: None)
    assert report.samples == "import"
    assert "one sample alone" in report.notes[0]


def test_wrong_samples_end_the_race_with_the_line_to_fix(tmp_path: Path) -> None:
    samples = tmp_path / "samples.npz"
    np.savez(samples, input=np.zeros((20, 64), int).astype(str))
    said = RaceProcess(race_task(tmp_path, samples=samples)).error()
    assert "input.astype('float32')" in said


def test_an_unknown_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="unknown target 'nothing'"):
        driver.run_race(race_task(tmp_path, targets=("onnxruntime", "nothing")), lambda _: None)


def test_a_machine_that_is_too_busy_for_a_race_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track, "BASELINE_S_MAX", 0.001)
    with pytest.raises(LateError, match="the machine is busy"):
        driver.run_race(race_task(tmp_path), lambda _: None)


def test_candidates_beyond_the_longest_time_are_skipped(race: Any) -> None:
    report = race([{"run_s": 0}], seconds_max=0.001)
    assert (row(report, 0).verdict, report.winner) == ("skipped", None)
    assert "--targets" in row(report, 0).why


def test_a_version_whose_file_is_gone_says_so(tmp_path: Path) -> None:
    task = race_task(tmp_path)
    (task.folder / task.manifest.served).unlink()
    assert "cannot be loaded" in RaceProcess(task).error()


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    task = race_task(tmp_path)
    task.cache.write_text("a file")
    assert "cannot use" in RaceProcess(task).error()


def test_a_version_without_batching_is_raced_call_by_call(tmp_path: Path) -> None:
    single = MLP.model_copy(update={"batching": False, "inputs": signature([("input", "FP32", (3, 64))], []).inputs})
    report = driver.run_race(race_task(tmp_path, of=single), lambda _: None)
    assert set(report.baseline_s) == {1}
    assert all(one.verdict in {"won", "lost"} for one in report.rows)
