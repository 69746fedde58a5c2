"""Run marks outlive a dead worker and name its batches; death notices round-trip."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from millstream.services.crashes.analyzer import CrashAnalyzer
from millstream.services.crashes.run_marks import PAGE_BYTES, FatalRun, RunMark, marked_workers, take_fatal_run
from millstream.services.queue.death_notices import Death


def die_running(folder: Path, worker: str, lane: str, *batches: str, over: bool = False) -> None:
    """Start a process that is killed in the middle of a run, or (`over`) after it."""
    child = os.fork()
    if child == 0:
        mark = RunMark(folder, worker)
        mark.begin("another lane with a longer name", ["b"] * 50)
        mark.end()
        mark.begin(lane, batches)
        if over:
            mark.end()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_mark_names_the_batches_of_a_dead_worker(tmp_path: Path) -> None:
    die_running(tmp_path, "w", "m:1:abc", "g-1", "g-2")
    assert marked_workers(tmp_path, "w") == ["w"]
    assert take_fatal_run(tmp_path, "w") == FatalRun("m:1:abc", ("g-1", "g-2"))
    assert take_fatal_run(tmp_path, "w") is None


def test_the_mark_of_an_idle_worker_names_no_batches(tmp_path: Path) -> None:
    die_running(tmp_path, "w", "m:1:abc", "g-1", over=True)
    assert take_fatal_run(tmp_path, "w") == FatalRun("", ())


def test_too_many_batches_leave_only_the_lane_in_the_mark(tmp_path: Path) -> None:
    die_running(tmp_path, "w", "m:1:abc", *(f"gateway-{number}" for number in range(PAGE_BYTES // 8)))
    assert take_fatal_run(tmp_path, "w") == FatalRun("m:1:abc", ())


def test_the_mark_of_a_live_worker_cannot_be_taken(tmp_path: Path) -> None:
    mark = RunMark(tmp_path / "runs", "w")
    mark.begin("m", ["b"])
    assert take_fatal_run(tmp_path / "runs", "w") is None
    assert marked_workers(tmp_path / "runs", "w") == ["w"]
    mark.close()
    assert not (tmp_path / "runs").exists()


def test_two_workers_with_the_same_id_cannot_share_a_mark(tmp_path: Path) -> None:
    mark = RunMark(tmp_path, "w")
    with pytest.raises(OSError, match="exists"):
        RunMark(tmp_path, "w")
    mark.close()


@pytest.mark.parametrize(
    "death",
    [Death("w"), Death("w", (), ""), Death("w", ("b1", "b2"), "m:1:abc"), Death("w", ("b",), 'a "name" with spaces')],
)
def test_a_death_notice_round_trips(death: Death) -> None:
    kind, _, text = death.message().partition(":")
    assert kind == "died"
    assert Death.read(text) == death


@pytest.mark.parametrize("text", ["w {", "w []", 'w {"batches": 3}', 'w {"batches": []}'])
def test_malformed_death_notices_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Death.read(text)


@pytest.mark.parametrize(
    ("code", "blamed"), [(-signal.SIGSEGV, "m:1:abc"), (-signal.SIGKILL, ""), (-signal.SIGTERM, ""), (0, "")]
)
def test_a_run_is_blamed_for_a_crash_but_not_for_a_signal_from_outside(tmp_path: Path, code: int, blamed: str) -> None:
    die_running(tmp_path / "runs", "w", "m:1:abc", "g-1")
    found = CrashAnalyzer(tmp_path, tmp_path / "repository", tmp_path / "runs").analyze("w", code, planned=False)
    assert found.death == Death("w", ("g-1",), blamed)
    assert found.model_at_fault is bool(blamed)
