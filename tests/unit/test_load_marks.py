"""Load marks outlive a dead process, and its death counts against the versions it was loading."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from millstream.services.crashes import analyzer
from millstream.services.crashes.analyzer import CrashAnalyzer
from millstream.services.crashes.load_marks import (
    DEATHS_ALONE,
    DEATHS_MAX,
    LoadMarks,
    Mark,
    marks_dir,
    record_death,
    take_stale_marks,
)
from millstream.services.model.manifest import Manifest
from millstream.services.process.exit_status import LOAD_STUCK, RUN_STUCK
from millstream.services.repository.folder import FolderRepository
from tests.contract.repositories import publish

KIND = "onnxruntime.cpu"
WORKER = "cpu-0-abcdef01-77"


@pytest.fixture
def repository(tmp_path: Path) -> FolderRepository:
    repository = FolderRepository(tmp_path / "repository")
    for model in ("bad", "good"):
        publish(repository, model)
    return repository


def die_loading(run_dir: Path, *manifests: Manifest, worker: str = WORKER, alone: bool = False) -> None:
    """Start a process that is killed in the middle of its loads."""
    child = os.fork()
    if child == 0:
        marks = LoadMarks(run_dir, worker)
        loads = [marks.loading(manifest, KIND, alone=alone) for manifest in manifests]
        for load in loads:
            load.__enter__()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def deaths(repository: FolderRepository, model: str) -> tuple[int, bool]:
    verdict = repository.verdicts.of(repository.manifest(model, 1))
    assert verdict.loads.keys() <= {KIND}
    return verdict.on(KIND).deaths, bool(verdict.on(KIND).failed)


def test_a_mark_exists_during_a_load_and_cannot_be_taken(repository: FolderRepository, tmp_path: Path) -> None:
    bad = repository.manifest("bad", 1)
    with LoadMarks(tmp_path, WORKER).loading(bad, KIND):
        assert len(list(marks_dir(tmp_path).iterdir())) == 1
        assert take_stale_marks(tmp_path, WORKER) == []
    assert list(marks_dir(tmp_path).iterdir()) == []


def test_a_stale_mark_is_taken_once(repository: FolderRepository, tmp_path: Path) -> None:
    bad = repository.manifest("bad", 1)
    die_loading(tmp_path, bad)
    assert take_stale_marks(tmp_path, "cpu-1-") == []
    assert take_stale_marks(tmp_path, "cpu-0-") == [Mark(manifest=bad, kind=KIND)]
    assert take_stale_marks(tmp_path, "cpu-0-") == []


def test_a_malformed_mark_is_ignored(tmp_path: Path) -> None:
    marks_dir(tmp_path).mkdir()
    (marks_dir(tmp_path) / f"{WORKER}.0").write_bytes(b'{"manifest": ')
    os.mkfifo(marks_dir(tmp_path) / f"{WORKER}.1")
    (marks_dir(tmp_path) / f"{WORKER}.2").symlink_to("/etc/passwd")
    assert take_stale_marks(tmp_path, WORKER) == []


def test_two_certain_deaths_fail_a_version(repository: FolderRepository) -> None:
    mark = Mark(kind=KIND, manifest=repository.manifest("bad", 1))
    assert record_death(repository, [mark], "was ended by SIGFPE", 1.0, certain=True) == [mark.manifest.content_id]
    assert deaths(repository, "bad") == (1, False)
    record_death(repository, [mark], "was ended by SIGFPE", 2.0, certain=True)
    verdict = repository.verdicts.of(mark.manifest).on(KIND)
    assert (verdict.deaths, verdict.failed_at) == (2, 2.0)
    assert "2 processes died while they loaded it, the last was ended by SIGFPE" in verdict.failed


def test_concurrent_loads_are_not_failed_by_two_deaths(repository: FolderRepository) -> None:
    marks = [Mark(kind=KIND, manifest=repository.manifest(model, 1)) for model in ("bad", "good")]
    for _ in range(2):
        record_death(repository, marks, "was ended by SIGFPE", 1.0, certain=True)
    assert deaths(repository, "good") == (2, False)


def test_a_load_beside_a_run_fails_only_after_the_most_deaths(repository: FolderRepository) -> None:
    mark = Mark(kind=KIND, manifest=repository.manifest("bad", 1))
    for _ in range(DEATHS_MAX - 1):
        record_death(repository, [mark], "was ended by SIGFPE", 1.0, certain=True, busy=True)
    assert deaths(repository, "bad") == (DEATHS_MAX - 1, False)
    record_death(repository, [mark], "was ended by SIGFPE", 1.0, certain=True, busy=True)
    assert deaths(repository, "bad") == (DEATHS_MAX, True)


def test_unexplained_deaths_of_an_isolated_load_fail_the_version(repository: FolderRepository) -> None:
    mark = Mark(kind=KIND, manifest=repository.manifest("bad", 1), alone=True)
    for _ in range(DEATHS_ALONE):
        assert deaths(repository, "bad")[1] is False
        record_death(repository, [mark], "unseen", 1.0, certain=False)
    assert deaths(repository, "bad") == (DEATHS_ALONE, True)


@pytest.mark.parametrize(
    ("code", "planned", "blamed", "counted"),
    [
        (-signal.SIGFPE, False, True, 1),
        (-signal.SIGSEGV, False, True, 1),
        (-signal.SIGABRT, False, True, 1),
        (1, False, True, 1),
        (LOAD_STUCK, False, True, 0),
        (RUN_STUCK, False, True, 0),
        (0, False, False, 0),
        (-signal.SIGTERM, False, False, 0),
        (-signal.SIGKILL, False, False, 0),
        (-signal.SIGFPE, True, False, 0),
    ],
)
def test_exit_codes_that_count_against_a_load(
    repository: FolderRepository, tmp_path: Path, code: int, planned: bool, blamed: bool, counted: int
) -> None:
    die_loading(tmp_path, repository.manifest("bad", 1))
    finder = CrashAnalyzer(tmp_path, tmp_path / "repository", tmp_path / "runs")
    assert finder.analyze(WORKER, code, planned=planned).model_at_fault is blamed
    assert deaths(repository, "bad")[0] == counted
    assert list(marks_dir(tmp_path).iterdir()) == []


def test_an_out_of_memory_kill_counts_against_the_load(
    repository: FolderRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_loading(tmp_path, repository.manifest("bad", 1))
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgfault 1\noom_kill 3\n")
    monkeypatch.setattr(analyzer, "_VMSTAT", vmstat)
    finder = CrashAnalyzer(tmp_path, tmp_path / "repository", tmp_path / "runs")
    vmstat.write_text("pgfault 1\noom_kill 4\n")
    assert finder.analyze(WORKER, -signal.SIGKILL, planned=False).model_at_fault
    assert deaths(repository, "bad") == (1, False)


def test_a_death_without_a_mark_is_no_model_s_fault(tmp_path: Path) -> None:
    assert (
        not CrashAnalyzer(tmp_path, tmp_path / "repository", tmp_path / "runs")
        .analyze(WORKER, -signal.SIGSEGV, planned=False)
        .model_at_fault
    )


def test_a_death_that_cannot_be_recorded_is_no_model_s_fault(repository: FolderRepository, tmp_path: Path) -> None:
    die_loading(tmp_path, repository.manifest("bad", 1))
    (tmp_path / "repository" / "models" / "bad" / "verdicts").write_text("in the way")
    assert (
        not CrashAnalyzer(tmp_path, tmp_path / "repository", tmp_path / "runs")
        .analyze(WORKER, -signal.SIGFPE, planned=False)
        .model_at_fault
    )
    with suppress(FileNotFoundError):
        assert list(marks_dir(tmp_path).iterdir()) == []
