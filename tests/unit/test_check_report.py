"""Reports of a checker that a model took over, and models with hostile descriptions: all input stays bounded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

from millstream.services.errors import Code, Failure
from millstream.services.ingest.archive import keep_only
from millstream.services.ingest.check_process import _outcome
from millstream.services.ingest.inspection import inspect
from millstream.services.ingest.report import NAME_CHARACTERS_MAX, RANK_MAX, TENSORS_MAX, CheckTask
from millstream.services.sandbox.child import REPORT_BYTES_MAX, Ended


def task(folder: Path) -> CheckTask:
    return CheckTask(
        folder=folder, batching=None, rows_max=8, unpacked_bytes_max=0, memory_bytes_max=1 << 30, cpu_s_max=1
    )


def report() -> dict[str, Any]:
    spec = {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
    return {
        "served": "source/model.onnx",
        "files": ["source/model.onnx"],
        "sources": ["source/model.onnx"],
        "signature": {"inputs": [spec], "outputs": [spec], "batching": True},
        "opset": 17,
        "ir_version": 8,
        "producer": "",
        "batching": {"decided": "proven", "reason": ""},
        "notes": [],
    }


def outcome(tmp_path: Path, document: bytes) -> object:
    return _outcome(Ended(document, b"", 0), task(tmp_path), 1.0)


def test_a_valid_report_is_accepted(tmp_path: Path) -> None:
    assert outcome(tmp_path, json.dumps({"outcome": report()}).encode())


TOO_MUCH: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file of the system": lambda r: r.update(served="/etc/passwd"),
    "a way out": lambda r: r.update(files=["source/../../../../etc/shadow"]),
    "a way out of the sources": lambda r: r.update(sources=["../other/model.onnx"]),
    "the folder itself": lambda r: r.update(files=["."]),
    "control characters": lambda r: r.update(files=["a\nb"]),
    "a long path": lambda r: r.update(files=["x" * 5000]),
    "too many files": lambda r: r.update(files=[str(number) for number in range(20_000)]),
    "too many notes": lambda r: r.update(notes=["note"] * 100),
    "a long note": lambda r: r.update(notes=["n" * 5000]),
    "a long reason": lambda r: r["batching"].update(reason="r" * 5000),
    "another decision": lambda r: r["batching"].update(decided="certainly"),
    "a long producer": lambda r: r.update(producer="p" * 5000),
    "a long name": lambda r: r["signature"]["inputs"][0].update(name="n" * 5000),
    "a long shape": lambda r: r["signature"]["inputs"][0].update(shape=[1] * 5000),
    "code that no importer made": lambda r: r.update(source_format="python"),
    "options of a load": lambda r: r.update(options={"configuration": "{}"}),
    "too many tensors": lambda r: r["signature"].update(inputs=r["signature"]["inputs"] * 5000),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_an_oversized_report_is_rejected(tmp_path: Path, what: str) -> None:
    hostile = report()
    TOO_MUCH[what](hostile)
    with pytest.raises(Failure) as caught:
        outcome(tmp_path, json.dumps({"outcome": hostile}).encode())
    assert caught.value.code is Code.INTERNAL
    assert len(caught.value.message) < 500


def test_a_report_beyond_its_limit_rejects_the_model(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="bytes to describe") as caught:
        outcome(tmp_path, b"[" * REPORT_BYTES_MAX)
    assert caught.value.code is Code.INVALID
    with pytest.raises(Failure, match="ended with status 0"):
        outcome(tmp_path, b"[" * 1_000_000)


def refused(tmp_path: Path, names: list[str], dims: list[int | str]) -> str:
    """Return the error for a model with inputs of these names and shapes, each with an output."""
    nodes = [helper.make_node("Relu", [name], [f"y{index}"]) for index, name in enumerate(names)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in names]
    results = [helper.make_tensor_value_info(f"y{index}", TensorProto.FLOAT, dims) for index in range(len(names))]
    model = helper.make_model(
        helper.make_graph(nodes, "g", values, results), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(Failure) as caught:
        inspect(task(tmp_path), source / "model.onnx")
    assert caught.value.code is Code.INVALID
    return caught.value.message


def test_models_with_an_oversized_description_are_rejected(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
    assert f"at most {TENSORS_MAX} can be served" in refused(
        folders[0], [f"x{n}" for n in range(TENSORS_MAX)], ["N", 1]
    )
    assert "has a name of 5000 characters" in refused(folders[1], ["x" * 5000], ["N", 1])
    assert f"at most {RANK_MAX} can be served" in refused(folders[2], ["x"], [1] * (RANK_MAX + 1))
    assert "has more than 1073741824 bytes" in refused(folders[3], ["x"], [1, 1 << 20, 1 << 20])
    assert NAME_CHARACTERS_MAX < 5000


def test_only_needed_files_are_kept(tmp_path: Path) -> None:
    folder, outside = tmp_path / "staging", tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (folder / "source" / "empty" / "deep").mkdir(parents=True)
    (folder / "source" / "data").mkdir()
    for name in ("source/model.onnx", "source/data/w.bin", "source/data/other.bin", "stray"):
        (folder / name).write_bytes(b"0")
    (folder / "source" / "linked").symlink_to(outside)
    (folder / "source" / "passwd").symlink_to("/etc/passwd")
    os.mkfifo(folder / "source" / "fifo")
    keep_only(folder, ["source/model.onnx", "source/data/w.bin"])
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "source/data/w.bin",
        "source/model.onnx",
    ]
    assert not (folder / "source" / "empty").exists()
    assert (outside / "secret").read_bytes() == b"secret"


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/etc/passwd"), os.mkfifo, lambda path: None])
def test_a_needed_file_must_be_a_regular_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "source").mkdir()
    make(tmp_path / "source" / "model.onnx")
    with pytest.raises(Failure, match="not a file of the upload"):
        keep_only(tmp_path, ["source/model.onnx"])
