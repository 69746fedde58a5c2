"""A worker follows choices with real libraries: swap in, trial, undo, swap back; memory is accounted for."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from millstream.plugins.compile.race.report import RaceReport
from millstream.plugins.compile.stored.job import Job, Jobs, RaceState, RaceUndone, new_job
from millstream.plugins.compile.stored.selection import Selections, decide, undo
from millstream.plugins.compile.worker import forms
from millstream.plugins.compile.worker.form import ServingForm
from millstream.plugins.compile.worker.forms import DEATHS_MAX, Forms, Trials
from millstream.services.metrics.catalogue import VARIANTS_SWAPPED
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.manifest import Manifest, ModelConfig, SourceFile
from millstream.services.model.version_files import describe_file
from millstream.services.placement.views import Footprint
from millstream.services.repository.documents import content_digest
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.records import State
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Stop
from millstream.workers.batches.watchdog import LoopState
from millstream.workers.models.load_version import LoadEnvironment, load
from millstream.workers.models.loaded_models import LoadedModel, LoadedModels
from millstream.workers.models.memory_budget import MemoryBudget
from tests.contract.backend_cases import signature
from tests.kit import models as kit
from tests.kit.versions import publish_content
from tests.kit.worker_parts import parts

MLP = signature([("input", "FP32", (-1, 64))], [("output", "FP32", (-1, 10))])
KIND, HERE = "onnxruntime.cpu", "0123456789abcdef"
INPUTS = {"input": np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)}


class Worker:
    """The parts of a worker that take part in swaps, with a main loop that waits."""

    def __init__(self, folder: Path, budget_bytes: int = 0) -> None:
        self.folder = folder
        self.repository = FolderRepository(folder / "repository")
        self.budget = MemoryBudget(budget_bytes, lambda: 0)
        self.at = LoadEnvironment(get_backend("onnxruntime", folder), "onnxruntime", "cpu", 1, self.budget)
        self.models = LoadedModels()
        self.registry = MetricsRegistry(None, "worker")
        self.loop = LoopState()
        self.loop.waiting = True
        self.jobs, self.selections = Jobs(self.repository), Selections(self.repository)
        self.forms = self.new_forms()

    def new_forms(self) -> Forms:
        """Return what a process of the worker follows selections with."""
        of = parts(self.folder, self.repository, self.at, self.models, self.registry, self.loop)
        return Forms(of, HERE)

    def load(self, manifest: Manifest) -> None:
        loaded = load(manifest, self.repository.folder_of(manifest), self.at, Stop())
        footprint = Footprint(10 << 20, 1 << 20, 0.1, True)
        self.budget.settle(manifest.content_id, footprint)
        measured = dict(loaded.profile.seconds)
        model = LoadedModel(manifest, State.READY, instance=loaded.instance, measured=measured, footprint=footprint)
        self.models.set(model)

    def model(self, manifest: Manifest) -> LoadedModel:
        found = self.models.get(manifest.content_id)
        assert found is not None
        return found

    def table(self, manifest: Manifest) -> ServingForm:
        instance = self.model(manifest).instance
        assert isinstance(instance, ServingForm)
        return instance

    def run(self, manifest: Manifest) -> np.ndarray:
        instance = self.model(manifest).instance
        assert instance is not None
        return np.asarray(instance.run(INPUTS)[0])

    def follow(self) -> None:
        self.forms.follow({(one.model, one.version) for one in self.jobs.all()})


def undone(worker: Worker, manifest: Manifest, one: Job) -> bool:
    return undo(worker.selections, worker.jobs, manifest, one, RaceUndone(why="asked for", at=2.0, automatic=False))


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


@pytest.fixture
def manifest(worker: Worker, tmp_path: Path) -> Manifest:
    content = kit.mlp(tmp_path / "mlp.onnx").read_bytes()
    publish_content(worker.repository, "mlp", content, "onnx", MLP, ModelConfig())
    found = worker.repository.manifest("mlp", 1)
    worker.load(found)
    return found


def race(worker: Worker, manifest: Manifest, state: RaceState = RaceState.RUNNING) -> Job:
    one = new_job(manifest, KIND, HERE, "cpu", 1.0).model_copy(update={"state": state})
    worker.jobs.put(one, lambda _: one)
    return one


def report(
    table: dict[int, str], backend: str = "openvino", content: bytes | None = None, **row: object
) -> dict[str, object]:
    """A report in which one candidate won; its file has `content`, None: it is the version's own."""
    files = [] if content is None else ["model.onnx"]
    compiled = {"files": files, "backend": backend, "options": {}, "runtime": "openvino 1"}
    rows = [{"target": backend, "candidate": "v-1", "folder": "v-1", "verdict": "won", "compiled": compiled, **row}]
    return {"winner": "v-1", "ratio": 2.0, "table": table, "rows": rows}


def decided(worker: Worker, manifest: Manifest, document: dict[str, object], content: bytes | None = None) -> Job:
    one = race(worker, manifest)
    cache = worker.selections.cache(manifest, KIND, HERE)
    for name in ("v-1", "loser-2"):
        (cache / name).mkdir(parents=True, exist_ok=True)
        (cache / name / "model.onnx").write_bytes(content or b"")
    assert decide(worker.selections, worker.jobs, manifest, one, RaceReport.model_validate(document), time.time())
    assert [path.name for path in cache.iterdir()] == ["v-1"]
    return one


def test_the_winner_serves_and_an_undo_brings_the_baseline_back(worker: Worker, manifest: Manifest) -> None:
    before, baseline = worker.run(manifest), worker.model(manifest).instance
    one = decided(worker, manifest, report({16: "v-1"}))
    worker.follow()
    table = worker.table(manifest)
    assert table.baseline is baseline
    np.testing.assert_allclose(worker.run(manifest), before, rtol=1e-3, atol=1e-5)
    assert table.runs == 1
    assert worker.model(manifest).variant == "openvino"
    assert worker.registry.counts(VARIANTS_SWAPPED) == {("mlp", "1", "cpu"): 1}
    assert worker.model(manifest).calls is not None
    assert worker.budget.used_bytes > 20 << 20, "both are accounted for"
    worker.follow()
    assert worker.table(manifest) is table, "nothing changes until the choice does"
    assert undone(worker, manifest, one)
    worker.follow()
    assert worker.model(manifest).instance is baseline
    assert worker.model(manifest).variant == ""
    np.testing.assert_array_equal(worker.run(manifest), before)
    assert worker.budget.footprint(f"{manifest.content_id} variants") is None
    stored = worker.jobs.get(one)
    assert stored is not None
    assert stored.undone is not None
    assert stored.undone.why == "asked for"


def test_a_worker_that_stopped_its_variants_undoes_them_for_all(worker: Worker, manifest: Manifest) -> None:
    one = decided(worker, manifest, report({16: "v-1"}))
    worker.follow()
    worker.table(manifest).fall_back("it was slow")
    worker.follow()
    assert worker.model(manifest).variant == ""
    stored = worker.jobs.get(one)
    assert stored is not None
    assert stored.undone is not None
    assert (stored.undone.why, stored.undone.automatic) == ("it was slow", True)
    assert worker.selections.get(manifest, KIND, HERE) is None


@pytest.mark.parametrize("content", [b"not a model", b""])
def test_a_variant_that_cannot_be_loaded_is_undone_and_the_version_serves_on(
    worker: Worker, manifest: Manifest, content: bytes
) -> None:
    before = worker.run(manifest)
    decided(worker, manifest, report({16: "v-1"}, "onnxruntime", content), content)
    used = worker.budget.used_bytes
    worker.follow()
    np.testing.assert_array_equal(worker.run(manifest), before)
    [one] = worker.jobs.of("mlp", 1)
    assert one.undone is not None
    assert "cannot be loaded" in one.undone.why
    assert worker.budget.used_bytes == used


def test_a_choice_that_makes_the_library_fail_is_undone_and_other_versions_follow_theirs(
    worker: Worker, manifest: Manifest
) -> None:
    publish_content(worker.repository, "other", manifest_bytes(worker, manifest), "onnx", MLP, ModelConfig())
    other = worker.repository.manifest("other", 1)
    worker.load(other)
    decided(worker, other, report({16: "v-1"}))
    one = decided(worker, manifest, report({16: "v-1"}))
    found = worker.selections.get(manifest, KIND, HERE)
    assert found is not None
    form = found.form.model_copy(
        update={"folder": "no\0folder", "files": (SourceFile(path="x", size_bytes=1, sha256="0" * 64),)}
    )
    worker.selections.put(manifest, KIND, HERE, found.model_copy(update={"form": form}))
    worker.follow()
    assert isinstance(worker.model(other).instance, ServingForm)
    assert not isinstance(worker.model(manifest).instance, ServingForm)
    stored = worker.jobs.get(one)
    assert stored is not None
    assert stored.undone is not None
    assert "cannot be loaded" in stored.undone.why
    assert worker.budget.footprint(f"{manifest.content_id} variants") is None


def manifest_bytes(worker: Worker, manifest: Manifest) -> bytes:
    return (worker.repository.folder_of(manifest) / manifest.served).read_bytes()


def test_a_damaged_variant_is_undone(worker: Worker, manifest: Manifest, tmp_path: Path) -> None:
    content = kit.mlp(tmp_path / "other.onnx").read_bytes()
    decided(worker, manifest, report({16: "v-1"}, "onnxruntime", content), content)
    [path] = worker.selections.compiled(manifest).glob("race-*/v-1/model.onnx")
    path.write_bytes(content[:-1] + b"\0")
    worker.follow()
    assert worker.model(manifest).variant == ""
    [one] = worker.jobs.of("mlp", 1)
    assert one.undone is not None
    assert "damaged" in one.undone.why


def test_without_memory_for_both_nothing_is_swapped_or_unloaded(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 15 << 20)
    content = kit.mlp(tmp_path / "mlp.onnx").read_bytes()
    publish_content(worker.repository, "mlp", content, "onnx", MLP, ModelConfig())
    manifest = worker.repository.manifest("mlp", 1)
    worker.load(manifest)
    decided(worker, manifest, report({16: "v-1"}))
    worker.follow()
    assert worker.model(manifest).variant == ""
    assert worker.selections.get(manifest, KIND, HERE) is not None, "it is tried again later"


def test_after_the_trial_a_death_says_nothing_of_the_form(
    worker: Worker, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "TRIAL_RUNS", 3)
    monkeypatch.setattr(forms, "TRIAL_S_MIN", 0.0)
    decided(worker, manifest, report({16: "v-1"}))
    worker.follow()
    assert (worker.folder / "variants-cpu-0.json").exists()
    for _ in range(3):
        worker.run(manifest)
    worker.follow()
    assert not (worker.folder / "variants-cpu-0.json").exists()


def test_a_choice_of_an_earlier_release_serves_only_after_another_race(worker: Worker, manifest: Manifest) -> None:
    decided(worker, manifest, report({16: "v-1"}))
    found = worker.selections.get(manifest, KIND, HERE)
    assert found is not None
    worker.selections.put(manifest, KIND, HERE, found.model_copy(update={"format": 1}))
    worker.follow()
    assert worker.model(manifest).variant == ""


def test_a_form_answers_within_its_bounds_and_the_version_all_others(worker: Worker, manifest: Manifest) -> None:
    """OpenVINO makes 0 of NaN in some batches, which a Relu turns into plausible numbers."""
    rows = np.random.default_rng(5).standard_normal((16, 64)).astype(np.float32)
    rows[3] = np.nan
    baseline = worker.model(manifest).instance
    assert baseline is not None
    expected = {count: np.asarray(baseline.run({"input": rows[:count]})[0]) for count in (1, 4, 16)}
    decided(worker, manifest, report({16: "v-1"}, bounds={"input": (-10.0, 10.0)}))
    worker.follow()
    table = worker.table(manifest)
    for count, answer in expected.items():
        found = np.asarray(table.run({"input": rows[:count]})[0])
        assert table.form == ("v-1" if count == 1 else "")
        np.testing.assert_allclose(found, answer, rtol=1e-3, atol=1e-5)


def test_processes_that_end_during_a_trial_undo_the_variant(worker: Worker, manifest: Manifest) -> None:
    decided(worker, manifest, report({16: "v-1"}))
    for _ in range(DEATHS_MAX):
        worker.follow()
        assert worker.model(manifest).variant
        worker.models.remove(manifest.content_id)  # the process dies, and its successor loads the version again
        worker.forms = worker.new_forms()
        worker.load(manifest)
    worker.follow()
    assert worker.model(manifest).variant == ""
    [one] = worker.jobs.of("mlp", 1)
    assert one.undone is not None
    assert "processes ended" in one.undone.why


def test_a_worker_that_leaves_in_order_counts_no_death(worker: Worker, manifest: Manifest) -> None:
    decided(worker, manifest, report({16: "v-1"}))
    worker.follow()
    worker.forms.close()
    trial = f"{manifest.content_id} {worker.table(manifest).selection.raced_at}"
    assert not Trials(worker.folder, "cpu-0").deaths(trial)
    assert not (worker.folder / "variants-cpu-0.json").exists()


def test_a_busy_main_loop_is_waited_for_before_anything_is_closed(worker: Worker, manifest: Manifest) -> None:
    one = decided(worker, manifest, report({16: "v-1"}))
    worker.follow()
    table = worker.table(manifest)
    undone(worker, manifest, one)
    worker.loop.runs, worker.loop.waiting = 7, False
    thread = threading.Thread(target=worker.follow)
    thread.start()
    while worker.model(manifest).variant:
        pass
    worker.loop.runs = 8  # it may have looked up the table before the swap
    assert len(table.run(INPUTS)) == 1, "it is not closed"
    worker.loop.runs = 9
    thread.join(120)
    assert not thread.is_alive()


def test_an_unloaded_version_leaves_no_account(worker: Worker, manifest: Manifest) -> None:
    decided(worker, manifest, report({16: "v-1"}))
    worker.follow()
    table = worker.table(manifest)
    worker.models.remove(manifest.content_id)
    table.close()
    worker.follow()
    assert worker.budget.footprint(f"{manifest.content_id} variants") is None


def test_a_report_of_a_race_that_was_cancelled_changes_nothing(worker: Worker, manifest: Manifest) -> None:
    one = race(worker, manifest, RaceState.CANCELLED)
    assert not decide(
        worker.selections, worker.jobs, manifest, one, RaceReport.model_validate(report({16: "v-1"})), 2.0
    )
    assert worker.selections.get(manifest, KIND, HERE) is None


def test_a_choice_names_every_file_of_its_variant(worker: Worker, manifest: Manifest, tmp_path: Path) -> None:
    one = race(worker, manifest)
    folder = worker.selections.cache(manifest, KIND, HERE) / "v-1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"a")
    (folder / "weights.bin").write_bytes(b"b")
    document = RaceReport.model_validate(report({1: "v-1"}, content=b"a"))
    assert decide(worker.selections, worker.jobs, manifest, one, document, 2.0)
    found = worker.selections.get(manifest, KIND, HERE)
    assert found is not None
    assert [file.path for file in found.form.files] == ["model.onnx", "weights.bin"]
    assert found.form.files[1] == describe_file(folder, "weights.bin")
    assert found.content == content_digest(manifest)
