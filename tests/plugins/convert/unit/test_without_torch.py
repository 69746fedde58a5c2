"""Without the plug-in `torch`, all importers but that of its programs work."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.services.ingest.importers import Source, importers
from millstream.services.plugin import registry
from tests.kit.wrong_files import zipped


def test_the_other_importers_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "chosen_plugins", lambda: "-torch")
    program, folder = tmp_path / "model.pt2", tmp_path / "1"
    program.write_bytes(zipped({"model/archive_format": b"pt2", "model/models/model.json": b"{}"}))
    folder.mkdir()
    (folder / "saved_model.pb").write_bytes(b"")
    found = importers()
    assert not any(one.recognises(Source(tmp_path, program)) for one in found.values())
    assert found["TensorFlow"].recognises(Source(tmp_path, folder))
