"""What a confined process may keep on the disk."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from pathlib import Path

import pytest

from millstream.services.process.c_library import c_library
from millstream.services.sandbox import group_watch
from millstream.services.sandbox.group_watch import FolderWatch

MIB = 1 << 20


def test_the_files_of_all_folders_count_together(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("one", "a/two", "a/b/three"):
        (tmp_path / name).write_bytes(os.urandom(MIB))
    assert not FolderWatch(tmp_path, 4 * MIB).measure()
    watch = FolderWatch(tmp_path, 2 * MIB)
    assert watch.measure()
    assert watch.exceeded == "its files take more than 2 MiB, the uploaded ones included"
    for name in ("one", "a/two", "a/b/three"):
        (tmp_path / name).unlink()
    assert watch.measure(), "what was exceeded before stays exceeded"


def test_holes_take_no_space(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert not FolderWatch(tmp_path, MIB).measure()


def test_deleted_files_count_while_they_are_open(tmp_path: Path) -> None:
    watch = FolderWatch(tmp_path, 2 * MIB)
    with tempfile.TemporaryFile(dir=tmp_path, buffering=0) as file:
        file.write(os.urandom(3 * MIB))
        assert not watch.measure()
        assert watch.measure(os.getpid())


def test_files_in_memory_count(tmp_path: Path) -> None:
    descriptor = os.memfd_create("test")
    try:
        os.write(descriptor, bytes(3 * MIB))
        assert FolderWatch(tmp_path, 2 * MIB).measure(os.getpid())
    finally:
        os.close(descriptor)


def test_too_many_files_and_too_deep_folders_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_watch, "ENTRIES_MAX", 3)
    monkeypatch.setattr(group_watch, "DEPTH_MAX", 2)
    for number in range(4):
        (tmp_path / str(number)).touch()
    watch = FolderWatch(tmp_path, MIB)
    assert watch.measure()
    assert watch.exceeded == "it made more than 3 files"
    for number in range(4):
        (tmp_path / str(number)).unlink()
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    watch = FolderWatch(tmp_path, MIB)
    assert watch.measure()
    assert watch.exceeded == "it made more than 2 folders in each other"


@pytest.mark.skipif(not os.geteuid(), reason="root lists every folder")
def test_folders_without_rights_are_named(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    watch = FolderWatch(tmp_path, MIB)
    assert watch.measure()
    assert watch.exceeded == "it made folders that cannot be listed"


def test_a_folder_that_is_gone_and_a_process_that_has_ended_are_no_errors(tmp_path: Path) -> None:
    assert not FolderWatch(tmp_path / "nothing", MIB).measure(1 << 22)


def test_deleted_files_count_while_they_are_mapped(tmp_path: Path) -> None:
    """They are held by one page, without a name and a descriptor; the kernel tells their sizes to root alone."""
    addresses = [map_and_delete(tmp_path, 3 * MIB)]
    try:
        assert FolderWatch(tmp_path, 2 * MIB).measure(os.getpid()) == (os.geteuid() == 0)
        addresses += [map_and_delete(tmp_path, 1) for _ in range(group_watch.MAPPED_MAX)]
        watch = FolderWatch(tmp_path, 1 << 40)
        assert watch.measure(os.getpid())
        assert watch.exceeded == f"it maps more than {group_watch.MAPPED_MAX} deleted files"
    finally:
        for address in addresses:
            c_library().munmap(ctypes.c_void_p(address), mmap.PAGESIZE)
    assert not FolderWatch(tmp_path, MIB).measure(os.getpid())


def map_and_delete(folder: Path, size_bytes: int) -> int:
    """Map the first page of a new file and return its address. Python's mmap would keep a descriptor."""
    map_file = c_library().mmap
    map_file.restype = ctypes.c_void_p
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(os.urandom(size_bytes))
        address = map_file(
            None, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), ctypes.c_long(0)
        )
    return int(address)
