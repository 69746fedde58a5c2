"""Shared memory as files: what the owner gives and takes back, what workers see, and what is left when one dies."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from millstream.services.errors import Code, Failure
from millstream.services.segments import pool as pool_module
from millstream.services.segments.pool import SEGMENT_BYTES, SegmentPool
from millstream.services.segments.segment import Segment, Segments, host_token, remove_leftovers
from millstream.services.wire.batch import ShmSlice

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of our own in the memory file system."""
    path = Path(f"/dev/shm/millstream-test-{os.getpid()}")
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """Segments of 64 KiB, so that limits are soon reached."""
    monkeypatch.setattr(pool_module, "SEGMENT_BYTES", 65536)
    return 65536


def test_what_the_owner_writes_workers_see_and_the_other_way_round(folder):
    owner, worker = SegmentPool(folder, "a", 64 * MIB), Segments(folder)
    first, second = owner.allocate(1000), owner.allocate(1000)
    assert first is not None
    assert second is not None
    owner.view(first)[:] = b"x" * 1000
    assert bytes(worker.view(first)) == b"x" * 1000
    worker.view(second)[:4] = b"back"
    assert bytes(owner.view(second)[:5]) == b"back\0"
    assert bytes(owner.view(first)) == b"x" * 1000
    owner.close()


def test_only_the_owners_user_may_look(folder):
    segment = Segment(folder, "a-1", 4096)
    assert (folder / "a-1").stat().st_mode & 0o777 == 0o600
    assert (folder / "a-1").stat().st_blocks * 512 == 4096  # there, not promised
    segment.close()


def test_a_pool_starts_with_nothing_grows_when_needed_and_shrinks_when_empty(folder, small):
    pool = SegmentPool(folder, "a", 10 * small)
    assert (pool.size_bytes, list(folder.iterdir())) == (0, [])
    places = [pool.allocate(40_000) for _ in range(3)]
    assert sorted(path.name for path in folder.iterdir()) == ["a-1", "a-2", "a-3"]
    assert pool.in_use_bytes == 3 * 40_000
    for place in places:
        assert place is not None
        pool.free(place)
    assert [path.name for path in folder.iterdir()] == ["a-3"]
    assert (pool.in_use_bytes, pool.size_bytes) == (0, small)
    pool.close()
    assert list(folder.iterdir()) == []


def test_an_idle_pool_keeps_no_memory(folder, small):
    """The last segment is kept for the next tensor, whatever its size, until the pool is told to remove it."""
    pool = SegmentPool(folder, "a", 10 * small)
    used, large = pool.allocate(40_000), pool.allocate(3 * small)
    assert used is not None
    assert large is not None
    pool.free(large)
    pool.remove_empty()
    assert [path.name for path in folder.iterdir()] == ["a-1"]
    assert len(pool.view(used)) == 40_000
    pool.free(used)
    assert pool.size_bytes == small
    pool.remove_empty()
    assert (pool.size_bytes, list(folder.iterdir())) == (0, [])
    again = pool.allocate(40_000)
    assert again is not None
    assert len(pool.view(again)) == 40_000
    pool.close()


def test_a_tensor_larger_than_a_segment_has_one_of_its_own(folder, small):
    pool = SegmentPool(folder, "a", 10 * small)
    place = pool.allocate(3 * small + 1)
    assert place is not None
    assert len(pool.view(place)) == 3 * small + 1
    pool.close()


def test_the_limit_is_never_passed(folder, small):
    pool = SegmentPool(folder, "a", 2 * small + 10_000)
    assert pool.allocate(2 * small + 10_000) is None
    places = [pool.allocate(60_000), pool.allocate(60_000)]
    assert None not in places
    assert pool.allocate(60_000) is None
    assert pool.allocate(5_000) is not None
    last = pool.allocate(9_000)  # what is left of the limit is a small segment
    assert last is not None
    assert pool.allocate(9_000) is None
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 2 * small + 10_000
    pool.free(last)
    assert pool.allocate(9_000) is not None
    pool.close()


def test_a_pool_without_room_says_so():
    assert SegmentPool(Path("/nowhere"), "a", 0).allocate(1) is None
    assert SegmentPool(Path("/nowhere"), "a", SEGMENT_BYTES).allocate(1) is None
    with pytest.raises(Failure, match="no shared memory") as failure:
        Segment(Path("/nowhere"), "a", 4096)
    assert failure.value.code is Code.STORAGE


def test_a_name_that_is_taken_is_not_overwritten(folder):
    (folder / "a-1").write_bytes(b"another owner's")
    assert SegmentPool(folder, "a", SEGMENT_BYTES).allocate(1) is None
    assert (folder / "a-1").read_bytes() == b"another owner's"


def test_giving_back_twice_shows(folder):
    pool = SegmentPool(folder, "a", SEGMENT_BYTES)
    place = pool.allocate(100)
    assert place is not None
    pool.free(place)
    with pytest.raises(KeyError):
        pool.free(place)
    pool.close()


def test_a_place_of_no_segment_is_refused(folder):
    owner, worker = SegmentPool(folder, "a", SEGMENT_BYTES), Segments(folder)
    with pytest.raises(ValueError, match="no segment b-1"):
        owner.view(ShmSlice("b-1", 0, 1))
    for name, code in (("b-1", Code.UNAVAILABLE), ("../a", Code.INTERNAL), ("..", Code.UNAVAILABLE)):
        with pytest.raises(Failure) as failure:
            worker.view(ShmSlice(name, 0, 1))
        assert failure.value.code is code
    (folder / "empty").touch()
    with pytest.raises(Failure, match="cannot be mapped"):
        worker.view(ShmSlice("empty", 0, 1))


@pytest.mark.parametrize(("offset", "size_bytes"), [(-1, 10), (4090, 7), (4097, 0), (0, 4097)])
def test_a_worker_reads_and_writes_inside_the_segment_only(folder, offset, size_bytes):
    segment = Segment(folder, "a-1", 4096)
    with pytest.raises(Failure, match="outside"):
        Segments(folder).view(ShmSlice("a-1", offset, size_bytes))
    segment.close()


def test_views_outlive_the_segment(folder):
    owner, worker = SegmentPool(folder, "a", SEGMENT_BYTES), Segments(folder)
    place = owner.allocate(8)
    assert place is not None
    mine = np.frombuffer(owner.view(place), np.uint8)
    owner.view(place)[:] = b"12345678"
    theirs = worker.view(place)
    owner.close()
    assert list(folder.iterdir()) == []
    assert (mine.tobytes(), bytes(theirs)) == (b"12345678", b"12345678")


def test_a_worker_lets_go_of_what_its_owner_removed_also_if_it_is_never_idle(folder):
    worker = Segments(folder)
    for number in range(20):
        segment = Segment(folder, f"a-{number}", 4096)
        worker.view(ShmSlice(segment.name, 0, 1))
        segment.close()
    assert removed_maps(folder) == 1
    worker.forget_removed()
    assert removed_maps(folder) == 0


def removed_maps(folder: Path) -> int:
    """Files of the folder that this process has mapped and that are gone."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(1 for line in lines if str(folder) in line and line.endswith("(deleted)"))


OWNER = """
import sys, time
from pathlib import Path
from millstream.services.segments.pool import SegmentPool
pool = SegmentPool(Path(sys.argv[1]), "app.1", 1 << 26)
print(pool.allocate(100).segment, flush=True)
time.sleep(600)
"""


def test_what_a_killed_owner_left_is_removed_and_nothing_else(folder):
    alive = Segment(folder, "app.2-1", 4096)
    other = SegmentPool(folder, "other", SEGMENT_BYTES)
    other.allocate(1)
    (folder / "app.3-1").touch()  # just made by its owner, who locks it next
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "app.1-1\n"
        assert remove_leftovers(folder, "app") == 0
        process.send_signal(signal.SIGKILL)
        process.wait(120)
    assert remove_leftovers(folder, "[a]pp") == 0
    assert remove_leftovers(folder, "app") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["app.2-1", "app.3-1", "other-1"]
    alive.close()
    other.close()


FILLED = """
import sys
from pathlib import Path
from millstream.services.errors import Code, Failure
from millstream.services.segments.pool import SegmentPool
from millstream.services.segments.segment import Segment
folder = Path(sys.argv[1])
assert SegmentPool(folder, "a", 1 << 30).allocate(1) is None
try:
    Segment(folder, "a-1", 2 << 20)
except Failure as failure:
    assert failure.code is Code.STORAGE, failure
small = Segment(folder, "a-2", 1 << 19)
small.view[:] = bytes(1 << 19)
assert [path.name for path in folder.iterdir()] == ["a-2"]
small.close()
print("never a SIGBUS")
"""
IN_TMPFS = "mount -t tmpfs -o size=1m tmpfs {0} && exec {1} -c '{2}' {0}"


def limits() -> list[str]:
    """How a small file system can be had here: a limit on files always, a real one where we may mount."""
    may = shutil.which("unshare") and subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
    return ["limit", "tmpfs"] if may and may.returncode == 0 else ["limit"]


@pytest.mark.parametrize("how", limits())
def test_a_file_system_without_room_is_a_failure_and_kills_nobody(tmp_path, how):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))

    command = [sys.executable, "-c", FILLED, str(tmp_path)]
    if how == "tmpfs":
        command = ["unshare", "-rm", "sh", "-c", IN_TMPFS.format(tmp_path, sys.executable, FILLED)]
    preexec = limit if how == "limit" else None
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=preexec)
    assert (done.returncode, done.stdout, done.stderr) == (0, "never a SIGBUS\n", "")


def test_processes_that_see_the_same_files_are_on_the_same_host(folder, tmp_path):
    assert host_token(folder) == host_token(Path("/dev/shm"))
    assert host_token(folder) != host_token(Path("/proc"))
    assert host_token(tmp_path).partition(":")[0] == host_token(folder).partition(":")[0]
