"""Folders as a hostile process could leave them are removed whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millstream.services.repository.staging import remove_tree

DEEP = 1500


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(folder)
        yield
    finally:
        os.fchdir(before)
        os.close(before)


def nest(folder: Path, depth: int) -> None:
    """Make folders in each other, deeper than any path can name."""
    with inside(folder):
        for _ in range(depth):
            Path("deep").mkdir()
            Path("file").write_bytes(b"x")
            os.chdir("deep")


def test_folders_thousands_deep_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "staging"
    folder.mkdir()
    nest(folder, DEEP)
    remove_tree(folder)
    assert list(tmp_path.iterdir()) == []


def test_folders_without_rights_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "staging"
    (folder / "inner" / "closed").mkdir(parents=True)
    (folder / "inner" / "closed" / "file").write_bytes(b"x")
    (folder / "inner" / "closed").chmod(0)
    (folder / "inner").chmod(0o500)
    folder.chmod(0o500)
    remove_tree(folder)
    assert list(tmp_path.iterdir()) == []


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_bytes(b"x")
    folder = tmp_path / "staging"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "link").symlink_to(kept)
    (folder / "link").symlink_to(kept)
    (folder / "inner").chmod(0)
    remove_tree(folder)
    assert not folder.exists()
    assert (kept / "file").read_bytes() == b"x"
    (tmp_path / "link").symlink_to(kept)
    remove_tree(tmp_path / "link")
    assert (kept / "file").exists()


def test_a_folder_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    remove_tree(tmp_path / "nothing")
