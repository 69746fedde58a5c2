"""What killed test runs left in shared memory is removed, and nothing of an installation that runs or starts."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from tests.kit.shm_leftovers import prefixes_in_use, remove_leftovers

DEAD, OPEN, MAPPED, YOUNG = (f"millstream-{letter * 12}-{'0' * 8}" for letter in "abcd")
LONG_AGO = 1_000_000.0


def aged(path: Path) -> Path:
    path.write_bytes(b"x" * mmap.PAGESIZE)
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


def test_files_of_installations_that_have_ended_are_removed(tmp_path: Path) -> None:
    for prefix in (DEAD, YOUNG):
        (tmp_path / f"{prefix}.metrics").mkdir()
        aged(tmp_path / f"{prefix}.metrics" / "gateway-0.db")
        os.utime(tmp_path / f"{prefix}.metrics", (LONG_AGO, LONG_AGO))
        aged(tmp_path / f"{prefix}.0-123-abc-1")
    (tmp_path / f"{YOUNG}.metrics" / "worker-0.db").touch()
    for prefix in (OPEN, MAPPED):
        aged(tmp_path / f"{prefix}.1")
        aged(tmp_path / f"{prefix}.2")
    aged(tmp_path / "millstream-mine.1")
    aged(tmp_path / f"{'e' * 12}.1")
    with (tmp_path / f"{OPEN}.1").open("rb"), (tmp_path / f"{MAPPED}.1").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.close()
        assert prefixes_in_use(tmp_path) == {OPEN, MAPPED}
        assert remove_leftovers(tmp_path) == 2
        mapped.close()
    left = {path.name.partition(".")[0] for path in tmp_path.iterdir()}
    assert left == {OPEN, MAPPED, YOUNG, "millstream-mine", "e" * 12}
    assert remove_leftovers(tmp_path) == 4
    assert len(list(tmp_path.iterdir())) == 4
