"""What a worker was running when it died, read from a page that outlives it; deaths as they are told."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from millstream.services.crashes.culprits import Culprits
from millstream.services.crashes.run_marks import PAGE_BYTES, FatalRun, RunMark, left_behind, take
from millstream.services.queue.death_notices import Death


def die_running(folder: Path, worker: str, lane: str, *batches: str, over: bool = False) -> None:
    """In a process of its own: it ends in the middle of a run, or (`over`) after it."""
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


def test_what_a_dead_worker_was_running(tmp_path: Path) -> None:
    die_running(tmp_path, "w", "m:1:abc", "g-1", "g-2")
    assert left_behind(tmp_path, "w") == ["w"]
    assert take(tmp_path, "w") == FatalRun("m:1:abc", ("g-1", "g-2"))
    assert take(tmp_path, "w") is None


def test_between_two_runs_it_ran_nothing(tmp_path: Path) -> None:
    die_running(tmp_path, "w", "m:1:abc", "g-1", over=True)
    assert take(tmp_path, "w") == FatalRun("", ())


def test_too_many_batches_are_not_noted_but_their_lane_is(tmp_path: Path) -> None:
    die_running(tmp_path, "w", "m:1:abc", *(f"gateway-{number}" for number in range(PAGE_BYTES // 8)))
    assert take(tmp_path, "w") == FatalRun("m:1:abc", ())


def test_nobody_takes_the_mark_of_one_that_lives(tmp_path: Path) -> None:
    mark = RunMark(tmp_path / "runs", "w")
    mark.begin("m", ["b"])
    assert take(tmp_path / "runs", "w") is None
    assert left_behind(tmp_path / "runs", "w") == ["w"]
    mark.close()
    assert not (tmp_path / "runs").exists()


def test_two_workers_of_one_id_do_not_share_a_mark(tmp_path: Path) -> None:
    mark = RunMark(tmp_path, "w")
    with pytest.raises(OSError, match="exists"):
        RunMark(tmp_path, "w")
    mark.close()


@pytest.mark.parametrize(
    "death",
    [Death("w"), Death("w", (), ""), Death("w", ("b1", "b2"), "m:1:abc"), Death("w", ("b",), 'a "name" with spaces')],
)
def test_a_death_is_told_and_read(death: Death) -> None:
    kind, _, text = death.message().partition(":")
    assert kind == "died"
    assert Death.read(text) == death


@pytest.mark.parametrize("text", ["w {", "w []", 'w {"batches": 3}', 'w {"batches": []}'])
def test_what_is_no_death_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Death.read(text)


@pytest.mark.parametrize(
    ("code", "blamed"), [(-signal.SIGSEGV, "m:1:abc"), (-signal.SIGKILL, ""), (-signal.SIGTERM, ""), (0, "")]
)
def test_a_run_is_blamed_for_a_crash_and_not_for_what_people_do(tmp_path: Path, code: int, blamed: str) -> None:
    die_running(tmp_path / "runs", "w", "m:1:abc", "g-1")
    found = Culprits(tmp_path, tmp_path / "repository", tmp_path / "runs").found("w", code, planned=False)
    assert found.death == Death("w", ("g-1",), blamed)
    assert found.blamed is bool(blamed)
