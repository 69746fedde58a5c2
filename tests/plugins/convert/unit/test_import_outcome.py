"""What an import's process leaves behind: by the upload's doing a 4xx, by ours a 5xx."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millstream.plugins.convert.conversion import _outcome
from millstream.plugins.convert.import_process import ImportTask, _of_import
from millstream.plugins.convert.pickles import PickleImporter
from millstream.services.errors import Code, Failure
from millstream.services.ingest.importers import IMPORTED, ImportOptions
from millstream.services.sandbox.child import Ended

MIB = 1 << 20


def task(folder: Path) -> ImportTask:
    return ImportTask(
        folder=folder,
        importer="scikit-learn",
        path="source/model",
        options=ImportOptions(),
        memory_bytes_max=MIB,
        cpu_s_max=1,
        file_bytes_max=MIB,
    )


def report(served: str = "imported/model.onnx", sample: str = "imported/samples.npz") -> bytes:
    document = {"served": served, "source_format": "onnx", "samples": [sample], "importer": "x", "producer": "x"}
    return json.dumps({"outcome": {**document, "rtol": 0, "atol": 0}}).encode()


def refused(folder: Path, content: bytes, status: int = 0) -> Failure:
    with pytest.raises(Failure) as caught:
        _outcome(Ended(content, b"", status), task(folder))
    assert "\n" not in caught.value.message
    return caught.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / IMPORTED / "folder").mkdir(parents=True)
    for name in ("model.onnx", "samples.npz"):
        (tmp_path / IMPORTED / name).write_bytes(b"x")
    (tmp_path / IMPORTED / "link").symlink_to("model.onnx")
    return tmp_path


@pytest.mark.parametrize("content", [b"", b"{}", b"no JSON", report("../x"), report("/etc/passwd")])
@pytest.mark.parametrize("status", [0, 3])
def test_a_process_that_the_model_ended_is_the_callers_error(folder: Path, content: bytes, status: int) -> None:
    failure = refused(folder, content, status)
    assert failure.code is Code.INVALID
    assert f"ended the process of its import (exit status {status})" in failure.message


def test_a_process_that_could_not_begin_is_ours(tmp_path: Path) -> None:
    assert refused(tmp_path, b"", 1).code is Code.INTERNAL


@pytest.mark.parametrize("name", ["imported/none", "imported/folder", "imported/link", "scratch/x", "manifest.json"])
def test_a_report_that_names_what_is_not_of_the_upload_is_the_callers_error(folder: Path, name: str) -> None:
    for content in (report(served=name), report(sample=name)):
        failure = refused(folder, content)
        assert failure.code is Code.INVALID
        assert "which is no file of the upload" in failure.message


def test_a_report_of_what_is_there_is_taken(folder: Path) -> None:
    assert _outcome(Ended(report(), b"", 0), task(folder)).served == "imported/model.onnx"


def test_a_module_that_is_missing_is_named() -> None:
    importer = PickleImporter()
    missing = _of_import(ModuleNotFoundError("No module named 'pandas'", name="pandas"), importer, 1 << 30).message
    assert missing == (
        "importing this scikit-learn model needs pandas, which the gateway does not have: "
        "pip install 'millstream[scikit-learn]' where it runs"
    )
    broken = _of_import(ImportError("libgomp.so.1: failed to map segment"), importer, 1 << 30).message
    assert "are 1024 MiB enough" in broken
