"""What a process was loading when it died: marks that outlive it, and what is concluded from them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from millstream.services.crashes import culprits
from millstream.services.crashes.culprits import Culprits
from millstream.services.crashes.exit_status import LOAD_STUCK, RUN_STUCK
from millstream.services.crashes.load_marks import (
    DEATHS_ALONE,
    DEATHS_MAX,
    LoadMarks,
    Mark,
    blame,
    left_behind,
    marks_dir,
)
from millstream.services.model.manifest import Manifest
from millstream.services.repository.folder import FolderRepository
from tests.contract.repositories import publish

WORKER = "cpu-0-abcdef01-77"


@pytest.fixture
def repository(tmp_path: Path) -> FolderRepository:
    repository = FolderRepository(tmp_path / "repository")
    for model in ("bad", "good"):
        publish(repository, model)
    return repository


def die_loading(run_dir: Path, *manifests: Manifest, worker: str = WORKER, alone: bool = False) -> None:
    """In a process of its own: it ends without a word in the middle of its loads."""
    child = os.fork()
    if child == 0:
        marks = LoadMarks(run_dir, worker)
        loads = [marks.loading(manifest, alone=alone) for manifest in manifests]
        for load in loads:
            load.__enter__()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def deaths(repository: FolderRepository, model: str) -> tuple[int, bool]:
    verdict = repository.verdicts.of(repository.manifest(model, 1))
    return verdict.load_deaths, bool(verdict.failed)


def test_a_mark_is_there_while_it_loads_and_nobody_else_takes_it(repository: FolderRepository, tmp_path: Path) -> None:
    bad = repository.manifest("bad", 1)
    with LoadMarks(tmp_path, WORKER).loading(bad):
        assert len(list(marks_dir(tmp_path).iterdir())) == 1
        assert left_behind(tmp_path, WORKER) == []
    assert list(marks_dir(tmp_path).iterdir()) == []


def test_what_a_dead_process_left_is_given_out_once(repository: FolderRepository, tmp_path: Path) -> None:
    bad = repository.manifest("bad", 1)
    die_loading(tmp_path, bad)
    assert left_behind(tmp_path, "cpu-1-") == []
    assert left_behind(tmp_path, "cpu-0-") == [Mark(manifest=bad)]
    assert left_behind(tmp_path, "cpu-0-") == []


def test_a_mark_that_is_not_whole_is_none(tmp_path: Path) -> None:
    marks_dir(tmp_path).mkdir()
    (marks_dir(tmp_path) / f"{WORKER}.0").write_bytes(b'{"manifest": ')
    os.mkfifo(marks_dir(tmp_path) / f"{WORKER}.1")
    (marks_dir(tmp_path) / f"{WORKER}.2").symlink_to("/etc/passwd")
    assert left_behind(tmp_path, WORKER) == []


def test_two_deaths_that_are_certain_fail_a_version(repository: FolderRepository) -> None:
    mark = Mark(manifest=repository.manifest("bad", 1))
    assert blame(repository, [mark], "was ended by SIGFPE", 1.0, certain=True) == [mark.manifest.content_id]
    assert deaths(repository, "bad") == (1, False)
    blame(repository, [mark], "was ended by SIGFPE", 2.0, certain=True)
    verdict = repository.verdicts.of(mark.manifest)
    assert (verdict.load_deaths, verdict.failed_at) == (2, 2.0)
    assert "2 processes died while they loaded it, the last was ended by SIGFPE" in verdict.failed


def test_of_several_loads_none_is_convicted(repository: FolderRepository) -> None:
    marks = [Mark(manifest=repository.manifest(model, 1)) for model in ("bad", "good")]
    for _ in range(2):
        blame(repository, marks, "was ended by SIGFPE", 1.0, certain=True)
    assert deaths(repository, "good") == (2, False)


def test_a_run_beside_it_may_have_been_the_cause(repository: FolderRepository) -> None:
    mark = Mark(manifest=repository.manifest("bad", 1))
    for _ in range(DEATHS_MAX - 1):
        blame(repository, [mark], "was ended by SIGFPE", 1.0, certain=True, busy=True)
    assert deaths(repository, "bad") == (DEATHS_MAX - 1, False)
    blame(repository, [mark], "was ended by SIGFPE", 1.0, certain=True, busy=True)
    assert deaths(repository, "bad") == (DEATHS_MAX, True)


def test_a_container_that_is_gone_each_time_convicts_what_was_tried_alone(repository: FolderRepository) -> None:
    mark = Mark(manifest=repository.manifest("bad", 1), alone=True)
    for _ in range(DEATHS_ALONE):
        assert deaths(repository, "bad")[1] is False
        blame(repository, [mark], "unseen", 1.0, certain=False)
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
def test_which_ends_are_blamed_on_a_load(
    repository: FolderRepository, tmp_path: Path, code: int, planned: bool, blamed: bool, counted: int
) -> None:
    die_loading(tmp_path, repository.manifest("bad", 1))
    finder = Culprits(tmp_path, tmp_path / "repository", tmp_path / "runs")
    assert finder.found(WORKER, code, planned=planned).blamed is blamed
    assert deaths(repository, "bad")[0] == counted
    assert list(marks_dir(tmp_path).iterdir()) == []


def test_the_kernel_that_ends_it_for_want_of_memory_counts(
    repository: FolderRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_loading(tmp_path, repository.manifest("bad", 1))
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgfault 1\noom_kill 3\n")
    monkeypatch.setattr(culprits, "_VMSTAT", vmstat)
    finder = Culprits(tmp_path, tmp_path / "repository", tmp_path / "runs")
    vmstat.write_text("pgfault 1\noom_kill 4\n")
    assert finder.found(WORKER, -signal.SIGKILL, planned=False).blamed
    assert deaths(repository, "bad") == (1, False)


def test_a_death_without_a_mark_is_our_own(tmp_path: Path) -> None:
    assert (
        not Culprits(tmp_path, tmp_path / "repository", tmp_path / "runs")
        .found(WORKER, -signal.SIGSEGV, planned=False)
        .blamed
    )


def test_what_cannot_be_noted_waits_as_any_crash(repository: FolderRepository, tmp_path: Path) -> None:
    die_loading(tmp_path, repository.manifest("bad", 1))
    (tmp_path / "repository" / "models" / "bad" / "verdicts").write_text("in the way")
    assert (
        not Culprits(tmp_path, tmp_path / "repository", tmp_path / "runs")
        .found(WORKER, -signal.SIGFPE, planned=False)
        .blamed
    )
    with suppress(FileNotFoundError):
        assert list(marks_dir(tmp_path).iterdir()) == []
