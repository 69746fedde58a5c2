"""Folders as people have them: the model is found, no other file is read or sent, and what is no model is refused."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import onnx
import pytest

from millstream.client.errors import WrongFile
from millstream.client.upload import ModelFiles
from millstream.services.errors import Failure
from millstream.services.ingest import layout
from tests.kit import models

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def put(folder: Path, *names: str) -> None:
    """Write files: models, JSON objects, and text that must not be sent."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".onnx"):
            models.scale(path)
        elif name.endswith(".json"):
            path.write_text('{"model_type": "bert"}' if path.name == "config.json" else "{}")
        else:
            path.write_bytes(b"x")


def external(path: Path, data: str = "", **options: Any) -> Path:
    """Write a model as torch.onnx.export does: its weights in a file beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    model = onnx.load(models.scale(path.parent / ".inline"))
    (path.parent / ".inline").unlink()
    location = data or f"{path.name}.data"
    onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=0, **options)
    return path


def sent(path: Path, **config: Any) -> list[str]:
    """Return the names of the files that are sent; of a file alone, its own."""
    files = ModelFiles.open(path, config)
    content = b"".join(files.body().chunks())
    assert len(content) == files.size_bytes
    if len(files._parts) == 1 and not files._parts[0].before:
        assert content == files._parts[0].path.read_bytes()
        return [files._parts[0].path.name]
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return archive.getnames()


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["any.onnx", "train.csv", "README.md", ".env", ".git/config"], ["any.onnx"]),
        (["model.onnx", "config.pbtxt", "tokenizer.json", "secrets.json"], "config.pbtxt model.onnx tokenizer.json"),
        (["1/model.onnx", "1/notes.txt"], ["model.onnx"]),
        (["9/model.onnx", "10/model.onnx"], ["model.onnx"]),
        (["export/model.onnx", "train.py"], ["model.onnx"]),
        (["onnx/model.onnx", "tokenizer.json"], "onnx/model.onnx tokenizer.json"),
        (["onnx/model.onnx", "onnx/model_quantized.onnx", "tokenizer.json"], "onnx/model.onnx tokenizer.json"),
        (["net/1/model.onnx", ".DS_Store", "__MACOSX/x"], ["model.onnx"]),
        (["MODEL.ONNX", "Thumbs.db"], ["MODEL.ONNX"]),
        (["saved_model.pb", "variables/variables.index", "keys.pem"], "saved_model.pb variables/variables.index"),
        (["2/saved_model.pb", "2/variables/v", "2/secret"], "2/saved_model.pb 2/variables/v"),
        (
            ["config.json", "model.safetensors", "vocab.txt", "tokenizer.json", "train.jsonl", "token", "run.py"],
            "config.json model.safetensors tokenizer.json vocab.txt",
        ),
        (["MAR-INF/MANIFEST.json", "net.pt", "other.pt"], "MAR-INF/MANIFEST.json net.pt other.pt"),
    ],
)
def test_what_belongs_to_the_model_is_sent_and_nothing_else(
    tmp_path: Path, names: list[str], expected: list[str] | str
) -> None:
    put(tmp_path, *names)
    if "MAR-INF/MANIFEST.json" in names:
        (tmp_path / names[0]).write_text(json.dumps({"model": {"serializedFile": "net.pt"}}))
    assert sent(tmp_path) == (expected.split() if isinstance(expected, str) else expected)


@pytest.mark.plugins
def test_a_folder_of_mlflow_is_sent_whole_and_nothing_beside_it(tmp_path: Path) -> None:
    put(tmp_path, "model.pkl", "data/model.keras", "components/tokenizer/tokenizer.json", "train.csv", "../out.bin")
    (tmp_path / "MLmodel").write_text(
        "flavors:\n  sklearn:\n    pickled_model: model.pkl\n  keras:\n    data: 'data'\n"
        "  pytorch:\n    model_data: ../out.bin\n  x:\n    data: /etc/passwd\n    model_path: .\n"
    )
    names = ["MLmodel", "components/tokenizer/tokenizer.json", "data/model.keras", "model.pkl", "train.csv"]
    assert sent(tmp_path) == names
    external(tmp_path / "model.onnx")
    (tmp_path / "MLmodel").write_text("flavors:\n  onnx:\n    data: model.onnx\n")
    assert sent(tmp_path) == sorted([*names, "model.onnx", "model.onnx.data"])


def test_files_that_the_configuration_names_are_sent(tmp_path: Path) -> None:
    put(tmp_path, "model.onnx", "labels.txt", "other.txt")
    labels = {"y": "source/labels.txt", "z": "source/../../etc/passwd", "a": "source//etc/passwd", "b": "source/"}
    assert sent(tmp_path, labels=labels) == ["labels.txt", "model.onnx"]
    (tmp_path / "labels.txt").unlink()
    assert sent(tmp_path, labels=labels) == ["model.onnx"]  # the server says that it is missing


def test_weights_beside_a_file_are_sent_with_it(tmp_path: Path) -> None:
    put(tmp_path, "other.onnx", "train.csv")
    model = external(tmp_path / "cls.onnx")
    assert sent(model) == ["cls.onnx", "cls.onnx.data"]
    (tmp_path / "data").mkdir()
    external(tmp_path / "deep.onnx", "data/w.bin")
    assert sent(tmp_path / "deep.onnx") == ["data/w.bin", "deep.onnx"]
    (tmp_path / "link.onnx").symlink_to(model)  # a link that was named leads anywhere
    assert sent(tmp_path / "link.onnx") == ["cls.onnx.data", "link.onnx"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "latest.onnx").symlink_to(model)
    assert sent(tmp_path / "elsewhere" / "latest.onnx") == ["cls.onnx", "cls.onnx.data"]


def test_hidden_files_that_are_named_are_sent(tmp_path: Path) -> None:
    external(tmp_path / "net.onnx", ".weights")
    assert sent(tmp_path) == [".weights", "net.onnx"]
    put(tmp_path, ".hidden.onnx")
    assert sent(tmp_path / ".hidden.onnx") == [".hidden.onnx"]


def test_two_models_may_share_their_weights(tmp_path: Path) -> None:
    for name in ("a.onnx", "b.onnx"):
        external(tmp_path / name, "both.data")
        (tmp_path / "kept").write_bytes((tmp_path / "both.data").read_bytes())
        (tmp_path / "both.data").unlink()
        (tmp_path / "kept").rename(tmp_path / "both.data")
    assert sent(tmp_path / "a.onnx") == ["a.onnx", "both.data"]
    refused(tmp_path, "there are 2 ONNX files (a.onnx, b.onnx): name the one to serve model.onnx, or push it alone")


def test_the_files_of_the_hubs_cache_are_links(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    external(blobs / "model.onnx")
    put(blobs, "tokenizer.json")
    for name in ("onnx/model.onnx", "onnx/model.onnx.data", "tokenizer.json"):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blobs / Path(name).name)
    assert sent(snapshot) == ["onnx/model.onnx", "onnx/model.onnx.data", "tokenizer.json"]
    assert sent(snapshot / "onnx" / "model.onnx") == ["model.onnx", "model.onnx.data"]


def test_a_model_alone_in_its_folder_is_the_same_upload_as_its_file(tmp_path: Path) -> None:
    put(tmp_path, "m/model.onnx", "m/README.md")
    assert ModelFiles.open(tmp_path / "m").sha256 == ModelFiles.open(tmp_path / "m" / "model.onnx").sha256


def test_the_same_folder_has_the_same_digest(tmp_path: Path) -> None:
    for name in ("a", "b"):
        external(tmp_path / name / "model.onnx")
    os.utime(tmp_path / "b" / "model.onnx", (1, 1))
    (tmp_path / "b" / "model.onnx").chmod(0o600)
    put(tmp_path / "b", "README.md")
    assert ModelFiles.open(tmp_path / "a").sha256 == ModelFiles.open(tmp_path / "b").sha256


def test_variants_that_are_not_served_are_named(tmp_path: Path) -> None:
    put(tmp_path, "onnx/model.onnx", "onnx/model_fp16.onnx", "onnx/model_q4.onnx", "2/model.onnx")
    refused(tmp_path, "there are ONNX files in several folders (onnx/model.onnx, onnx/model_fp16.onnx, ")
    (tmp_path / "2" / "model.onnx").unlink()
    (note,) = ModelFiles.open(tmp_path).notes
    assert note == (
        "onnx/model.onnx is served, not onnx/model_fp16.onnx, onnx/model_q4.onnx: push a file by itself to serve it."
    )
    put(tmp_path / "served", "9/model.onnx", "10/model.onnx")
    assert ModelFiles.open(tmp_path / "served").notes[0].startswith("10/model.onnx is served, not 9/: ")


def refused(path: Path, says: str) -> None:
    with pytest.raises(Failure) as caught:
        ModelFiles.open(path)
    message = caught.value.message
    assert says in message, message
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ([], "there is no model in this folder: it has no files"),
        ([".hidden"], "there is no model in this folder: it has no files"),
        (["train.csv", "notes/x.md"], "nothing in it is known as one (notes, train.csv, notes/x.md): push"),
        (["decoder.onnx", "encoder.onnx"], "there are 2 ONNX files (decoder.onnx, encoder.onnx): name the one to"),
        (["onnx/decoder.onnx", "onnx/encoder.onnx"], "2 ONNX files (onnx/decoder.onnx, onnx/encoder.onnx)"),
        (["onnx/model.onnx", "export/model.onnx"], "several folders (onnx/model.onnx, export/model.onnx): push"),
        (["work/deep/net.onnx", "x"], "there is none at its top; work/deep/net.onnx is in a folder: push that file"),
        (["config.pbtxt", "1/model.onnx"], "`millstream up --triton-repository FOLDER`"),
        (["a/config.pbtxt", "b/config.pbtxt"], "a Triton repository of 2 models (a, b)"),
        (["weights.npy", "x"], "in this folder: weights.npy: this is an array of numpy, not an ONNX model"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_before_anything_is_read(
    tmp_path: Path, names: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, *names)
    monkeypatch.setattr(ModelFiles, "body", None)
    refused(tmp_path, says)


def links(folder: Path) -> None:
    (folder / "model.onnx").symlink_to("/etc/hostname")


def linked_folder(folder: Path) -> None:
    put(folder.parent, "outside/model.onnx")
    (folder / "1").symlink_to(folder.parent / "outside")


def linked_weights(folder: Path) -> None:
    external(folder / "model.onnx")
    (folder / "model.onnx.data").rename(folder.parent / "secret")
    (folder / "model.onnx.data").symlink_to(folder.parent / "secret")


def broken_link(folder: Path) -> None:
    external(folder / "model.onnx")
    (folder / "model.onnx.data").unlink()
    (folder / "model.onnx.data").symlink_to("nowhere")


def missing(folder: Path) -> None:
    (external(folder / "model.onnx").parent / "model.onnx.data").unlink()


def other_case(folder: Path) -> None:
    (external(folder / "model.onnx").parent / "model.onnx.data").rename(folder / "Model.onnx.data")


def short(folder: Path) -> None:
    os.truncate(external(folder / "model.onnx").parent / "model.onnx.data", 1)


def climbing(folder: Path) -> None:
    content = external(folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(content.replace(b"model.onnx.data", b"../../../passwd"))


def pointer(folder: Path) -> None:
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_text(LFS)


def hub_pointer(folder: Path) -> None:
    pointer(folder)
    put(folder, "config.json")


def fifo(folder: Path) -> None:
    put(folder, "model.onnx")
    os.mkfifo(folder / "tokenizer.json")


def huge(folder: Path) -> None:
    put(folder, *(f"{number}.txt" for number in range(60)))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (links, "model.onnx is a link out of the folder: copy the file into it"),
        (linked_folder, "1/model.onnx is a link out of the folder"),
        (linked_weights, "model.onnx.data is a link out of the folder"),
        (broken_link, "the model's weights are in 'model.onnx.data', which is missing beside the model"),
        (missing, "the model's weights are in 'model.onnx.data', which is missing beside the model"),
        (other_case, "there is 'Model.onnx.data', whose name differs in case: rename it"),
        (short, "'model.onnx.data' has 1 bytes, but the model reads up to byte 4"),
        (climbing, "'../../../passwd', which is not a path below the model's folder"),
        (pointer, "onnx/model.onnx: this is a Git LFS pointer, not an ONNX model: run `git lfs pull`"),
        (hub_pointer, "onnx/model.onnx: this is a Git LFS pointer, not an ONNX model: run `git lfs pull`"),
        (fifo, "tokenizer.json is neither a file nor a folder"),
        (huge, "has more than 50 entries: it is no model's folder"),
    ],
)
def test_hostile_folders_are_refused(
    tmp_path: Path, make: Callable[[Path], None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "ENTRIES_MAX", 50)
    folder = tmp_path / "model"
    folder.mkdir()
    make(folder)
    refused(folder, says)


def test_a_home_folder_is_looked_at_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        put(tmp_path, *(f"project-{number}/src/{name}.py" for name in range(20)), f"project-{number}/.git/config")
    put(tmp_path, "zzz/deep/net.onnx")
    looked_at: list[str] = []
    scan: Callable[..., Any] = os.scandir

    def counted(path: Path) -> Any:
        looked_at.append(str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", counted)
    monkeypatch.setattr(layout, "_NAMES_LOOKED_AT", 100)
    refused(tmp_path, "there is no model in this folder: nothing in it is known as one (project-0, project-1, ")
    assert len(looked_at) < 100
    assert not any(".git" in path for path in looked_at)


def test_what_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "pointer.onnx").write_text(LFS)
    os.mkfifo(tmp_path / "fifo")
    cases: Iterable[tuple[str, str]] = (
        ("nowhere.onnx", "there is no such file"),
        ("empty.onnx/x", "Not a directory"),
        ("empty.onnx", "the file is empty"),
        ("pointer.onnx", "this is a Git LFS pointer"),
        ("fifo", "this is neither a file nor a folder"),
        ("a\0b", "null"),
    )
    for name, says in cases:
        refused(tmp_path / name, says)
    with pytest.raises(WrongFile):
        ModelFiles.open(tmp_path / "empty.onnx")
