"""Files that a configuration names: only regular files inside the version's folder, as they were published."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.plugins.compat.triton.config.model_folder import read_model_folder
from millstream.services.errors import Failure
from millstream.services.model.manifest import ModelConfig, SourceFile
from millstream.services.model.version_files import (
    LABEL_BYTES_MAX,
    LABEL_NAMES_MAX,
    check_labels,
    describe_file,
    read_inside,
    read_label_names,
)
from millstream.services.repository.folder import FolderRepository
from millstream.workers.models.load_version import verify
from tests.kit.versions import SIGNATURE, publish


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A version's folder with one file and, outside of it, a secret."""
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "version"
    (folder / "source").mkdir(parents=True)
    (folder / "source" / "labels.txt").write_text("cat\r\n dog \nbird\n")
    return folder


def _published(folder: Path, path: str) -> tuple[SourceFile, ...]:
    content = (folder / path).read_bytes()
    return (SourceFile(path=path, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()),)


def test_a_file_inside_is_read(folder: Path) -> None:
    files = _published(folder, "source/labels.txt")
    assert read_label_names(folder, "source/labels.txt", files) == ("cat", "dog", "bird")
    assert check_labels(ModelConfig(labels={"y": "source/labels.txt"}), SIGNATURE, folder) == ["source/labels.txt"]


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "source/../../secret",
        "/etc/passwd",
        "/proc/self/environ",
        "",
        ".",
        "source",
        "source/",
        "source//labels.txt",
        "source/absent",
        "source\\labels.txt",
        "source/labels.txt\0",
        "x" * 5000,
    ],
)
def test_what_leads_out_or_is_no_file_is_refused(folder: Path, path: str) -> None:
    with pytest.raises(Failure):
        read_inside(folder, path, 100)
    with pytest.raises(Failure, match=r"config\.labels"):
        check_labels(ModelConfig(labels={"y": path}), SIGNATURE, folder)


def test_links_are_refused_wherever_they_are(folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent / "secret")
    (folder / "inner").symlink_to(folder / "source" / "labels.txt")
    (folder / "out").symlink_to(folder.parent)
    for path in ("link", "inner", "out/secret"):
        with pytest.raises(Failure, match="link"):
            read_inside(folder, path, 100)


def test_nobody_waits_for_a_fifo_or_reads_a_device(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    with pytest.raises(Failure, match="not a regular file"):
        read_inside(folder, "fifo", 100)


def _device(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("make", [_device, os.mkfifo])
def test_a_model_that_is_no_file_any_more_stops_neither_its_worker_nor_a_gateway(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    folder = tmp_path / "model"
    manifest = publish(FolderRepository(tmp_path / "repository"), "model", 1)
    file = folder / manifest.files[0].path
    file.parent.mkdir(parents=True)
    make(file)
    with pytest.raises(Failure, match="not a regular file"):
        verify(folder, manifest)
    with pytest.raises(OSError, match="not a regular file"):
        describe_file(folder, manifest.files[0].path)
    make(folder / "config.pbtxt")
    with pytest.raises(Failure, match=r"config\.pbtxt cannot be read: it is not a regular file"):
        read_model_folder(folder, "model", None)


def test_a_link_to_a_model_is_followed(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "source" / "labels.txt")
    assert describe_file(folder, "link").size_bytes == 16


def test_a_file_that_was_changed_or_is_not_the_versions_is_refused(folder: Path) -> None:
    files = _published(folder, "source/labels.txt")
    (folder / "source" / "labels.txt").write_text("other")
    with pytest.raises(Failure, match="damaged"):
        read_label_names(folder, "source/labels.txt", files)
    with pytest.raises(Failure, match="not one of the version's files"):
        read_label_names(folder, "source/labels.txt", ())


def test_limits(folder: Path) -> None:
    labels = folder / "source" / "labels.txt"
    config = ModelConfig(labels={"y": "source/labels.txt"})
    with labels.open("wb") as file:
        file.truncate(LABEL_BYTES_MAX + 1)
    with pytest.raises(Failure, match="more than"):
        check_labels(config, SIGNATURE, folder)
    labels.write_bytes(b"\n" * (LABEL_NAMES_MAX + 1))
    with pytest.raises(Failure, match="lines"):
        check_labels(config, SIGNATURE, folder)
    labels.write_bytes(b"\xff")
    with pytest.raises(Failure, match="UTF-8"):
        check_labels(config, SIGNATURE, folder)


def test_an_output_that_the_model_does_not_have(folder: Path) -> None:
    with pytest.raises(Failure, match="no output 'z'"):
        check_labels(ModelConfig(labels={"z": "source/labels.txt"}), SIGNATURE, folder)
