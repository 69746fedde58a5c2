"""Uploads of files and folders: the bytes that are sent, their digest, and what is refused before anything is sent."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import pytest

from millstream.client.call import Body
from millstream.client.errors import VersionFailed
from millstream.client.upload import ModelFiles, UploadOptions, push
from millstream.services.errors import Failure
from millstream.services.ingest import packing
from tests.kit.scripted_steps import Script, reply


def sent(files: ModelFiles) -> bytes:
    return b"".join(files.body().chunks())


def test_a_file_is_sent_as_it_is(tmp_path):
    content = os.urandom(3 * packing.PIECE_BYTES + 1)
    (tmp_path / "m.onnx").write_bytes(content)
    files = ModelFiles.open(tmp_path / "m.onnx")
    assert (files.size_bytes, files.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert sent(files) == content
    assert sent(files) == content  # for another attempt


def test_progress_ends_at_the_size(tmp_path):
    (tmp_path / "m.onnx").write_bytes(bytes(3 * packing.PIECE_BYTES + 1))
    files = ModelFiles.open(tmp_path / "m.onnx")
    seen: list[tuple[int, int]] = []
    list(files.body(lambda *numbers: seen.append(numbers)).chunks())
    assert [part[0] for part in seen] == [
        packing.PIECE_BYTES * 1,
        packing.PIECE_BYTES * 2,
        packing.PIECE_BYTES * 3,
        files.size_bytes,
    ]
    assert {part[1] for part in seen} == {files.size_bytes}


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
    document = {"version": 7, "state": "loading", "reason": None, "notes": []}

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
        documents = [
            reply({"version": 7, "state": state, "reason": "why", "notes": [], "pools": ["cpu"]}) for state in states
        ]
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
