"""Uploads of files and folders: the bytes that are sent, their digest, and what is refused before anything is sent."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from millstream.services.client import upload
from millstream.services.client.call import Body
from millstream.services.client.errors import VersionFailed
from millstream.services.client.upload import ModelFiles, UploadOptions, push
from millstream.services.errors import Failure
from tests.kit.scripted_steps import Script, reply


def sent(files: ModelFiles) -> bytes:
    return b"".join(files.body().chunks())


def test_a_file_is_sent_as_it_is(tmp_path):
    content = os.urandom(3 * upload.CHUNK_BYTES + 1)
    (tmp_path / "m.onnx").write_bytes(content)
    files = ModelFiles.open(tmp_path / "m.onnx")
    assert (files.size_bytes, files.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert sent(files) == content
    assert sent(files) == content  # for another attempt


def test_progress_ends_at_the_size(tmp_path):
    (tmp_path / "m.onnx").write_bytes(bytes(3 * upload.CHUNK_BYTES + 1))
    files = ModelFiles.open(tmp_path / "m.onnx")
    seen: list[tuple[int, int]] = []
    list(files.body(lambda *numbers: seen.append(numbers)).chunks())
    assert [part[0] for part in seen] == [
        upload.CHUNK_BYTES * 1,
        upload.CHUNK_BYTES * 2,
        upload.CHUNK_BYTES * 3,
        files.size_bytes,
    ]
    assert {part[1] for part in seen} == {files.size_bytes}


def folder_of(parent: Path) -> Path:
    folder = parent / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"m" * 600)
    (folder / "sub" / "weights ü.bin").write_bytes(b"w" * 1024)
    (folder / "empty").touch()
    (folder / ".hidden").write_bytes(b"h")
    (folder / ".git").mkdir()
    (folder / ".git" / "x").write_bytes(b"x")
    (parent / "blob").write_bytes(b"linked")
    (folder / "link").symlink_to(parent / "blob")
    return folder


def test_a_folder_is_sent_as_a_tar(tmp_path):
    files = ModelFiles.open(folder_of(tmp_path))
    content = sent(files)
    assert len(content) == files.size_bytes
    assert hashlib.sha256(content).hexdigest() == files.sha256
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert members == {"model.onnx": b"m" * 600, "sub/weights ü.bin": b"w" * 1024, "empty": b"", "link": b"linked"}


def test_the_same_folder_has_the_same_digest(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = folder_of(tmp_path / "a"), folder_of(tmp_path / "b")
    os.utime(other / "model.onnx", (1, 1))
    (other / "model.onnx").chmod(0o600)
    assert ModelFiles.open(one).sha256 == ModelFiles.open(other).sha256


def test_long_names_survive(tmp_path):
    folder = tmp_path / "model" / ("d" * 200)
    folder.mkdir(parents=True)
    (folder / ("f" * 195 + ".onnx")).write_bytes(b"x")
    with tarfile.open(fileobj=io.BytesIO(sent(ModelFiles.open(tmp_path / "model")))) as archive:
        assert archive.getnames() == [f"{'d' * 200}/{'f' * 195}.onnx"]


def test_what_cannot_be_sent_is_refused(tmp_path, monkeypatch):
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "odd").mkdir()
    os.mkfifo(tmp_path / "odd" / "fifo")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "many").mkdir()
    for number in range(4):
        (tmp_path / "many" / str(number)).touch()
    monkeypatch.setattr(upload, "FILES_MAX", 3)
    for name, says in (
        ("nowhere.onnx", "there is no such file"),
        ("empty.onnx/x", "Not a directory"),
        ("empty.onnx", "the file is empty"),
        ("folder", "the folder has no files"),
        ("odd", "fifo: this is not a file"),
        ("broken", "link: this is not a file"),
        ("many", "more than 3 files"),
        ("a\0b", "null"),
    ):
        with pytest.raises(Failure, match=says) as failure:
            ModelFiles.open(tmp_path / name)
        assert "\n" not in failure.value.message


@pytest.mark.parametrize("change", [b"short", b"x" * 2000])
def test_a_file_that_changes_meanwhile_is_noticed(tmp_path, change):
    path = tmp_path / "m.onnx"
    path.write_bytes(bytes(1000))
    files = ModelFiles.open(path)
    path.write_bytes(change)
    with pytest.raises(Failure, match="the file changed while it was read"):
        sent(files)
    path.unlink()
    with pytest.raises(Failure, match="No such file"):
        sent(files)


def test_the_request_of_an_upload(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"\0model")
    files = ModelFiles.open(tmp_path / "m.onnx")
    document = {"version": 7, "state": "loading", "reason": None}

    def pushed(number: int | None, **options: object) -> Script:
        script = Script(reply(document, 201))
        asked = UploadOptions(number, **options)  # type: ignore[arg-type]
        script.run(push("m", files, asked, None, lambda: script.now), timeout_s=None)
        return script

    (call,) = pushed(None).calls
    assert (call.method, call.path, call.query) == ("POST", "/admin/v1/models/m/versions", {})
    assert call.headers["X-Content-SHA256"] == files.sha256
    assert isinstance(call.content, Body)
    (call,) = pushed(7, config={"rows_max": 2}, activate=False, wait_s=30.0).calls
    assert (call.method, call.path) == ("PUT", "/admin/v1/models/m/versions/7")
    assert call.query == {"wait": "30", "activate": "false", "config": '{"rows_max": 2}'}
    document["state"], document["reason"] = "failed", "no memory"
    with pytest.raises(VersionFailed, match="m version 7 failed: no memory"):
        pushed(7)


def test_a_long_wait_asks_again(tmp_path):
    """A proxy would give up on a reply that is silent for minutes."""
    (tmp_path / "m.onnx").write_bytes(b"\0model")
    files = ModelFiles.open(tmp_path / "m.onnx")

    def pushed(*states: str, wait_s: float = 300) -> tuple[Script, Any]:
        documents = [reply({"version": 7, "state": state, "reason": "why", "pools": ["cpu"]}) for state in states]
        script = Script(*documents)
        steps = push("m", files, UploadOptions(wait_s=wait_s), None, lambda: script.now)
        return script, script.run(steps, timeout_s=None)

    script, document = pushed("loading", "loading", "ready")
    assert script.calls[0].query == {"wait": "30"}
    assert script.sent[1:] == [("GET", "/admin/v1/models/m/versions/7")] * 2
    assert document["state"] == "ready"
    script, document = pushed("loading")
    assert document["state"] == "loading"
    assert script.now - 1000 == pytest.approx(270, abs=1)
    for state in ("ready", "unloaded"):
        assert len(pushed(state)[0].calls) == 1
    assert len(pushed("loading", wait_s=30)[0].calls) == 1
    with pytest.raises(VersionFailed, match="why"):
        pushed("loading", "failed")
