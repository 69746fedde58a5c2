"""Each file that is no ONNX model is recognised, and every ONNX model is let through."""

from __future__ import annotations

import bz2
import gzip
import lzma
import pickle
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.services.ingest.file_kind import HEAD_BYTES, why_no_model, why_not_onnx
from tests.kit import models
from tests.kit.wrong_files import OF_FRAMEWORKS, ONNX, WRONG_FILES, tarred, zipped

#: files that only unpacking shows to have no model
UNPACKED = {"saved-model-tar", "pickle-in-tar", "zip"}


@pytest.mark.parametrize("name", sorted(WRONG_FILES.keys() - UNPACKED - OF_FRAMEWORKS))
def test_the_message_names_the_kind_and_what_to_do(tmp_path: Path, name: str) -> None:
    content, says = WRONG_FILES[name]
    file = tmp_path / "model.onnx"
    file.write_bytes(content)
    why = why_not_onnx(file)
    assert why is not None
    assert says in why
    assert "\n" not in why
    assert len(why) < 400


@pytest.mark.parametrize("name", sorted(UNPACKED))
def test_archives_are_left_to_unpacking(tmp_path: Path, name: str) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(WRONG_FILES[name][0])
    assert why_not_onnx(file) is None


def test_models_and_their_archives_pass(tmp_path: Path) -> None:
    file = tmp_path / "model"
    for path in (models.mlp(tmp_path / "a.onnx"), models.identity(tmp_path / "b.onnx", "BYTES")):
        content = path.read_bytes()
        for one in (content, zipped({"m.onnx": content}), tarred({"m.onnx": content}), tarred({"m": content}, "w:gz")):
            file.write_bytes(one)
            assert why_not_onnx(file) is None
    file.write_bytes(zipped({"data.pkl": b"", "deep/model.onnx": ONNX}))
    assert why_not_onnx(file) is None  # unpacking says that the model is in a folder


@settings(deadline=None, derandomize=True)
@given(st.integers(1, len(ONNX) - 1))
def test_no_cut_of_a_model_passes(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    file = tmp_path_factory.getbasetemp() / "cut.onnx"
    file.write_bytes(ONNX[:size])
    why = why_not_onnx(file)
    assert why is None or "cut short" in why
    assert why is not None or size > len(ONNX) - 16  # only the last fields, which are optional, may be missing


@settings(deadline=None, derandomize=True)
@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"\x1f\x8b\x08", b"BZh9", b"\xfd7zXZ\0", b"x\x9c", b"PK\x03\x04", b"\x08\x07"]),
)
def test_no_content_raises(tmp_path_factory: pytest.TempPathFactory, content: bytes, magic: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.onnx"
    file.write_bytes(magic + content)
    why = why_not_onnx(file)
    assert why is None or (why.isprintable() and len(why) < 400)


def test_files_of_any_content_are_not_called_damaged_models(tmp_path: Path) -> None:
    file, content = tmp_path / "any.onnx", random.Random(1)
    for _ in range(500):
        file.write_bytes(content.randbytes(300))
        why = why_not_onnx(file)
        assert why is None or "cut short" not in why


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.delattr(pickle, name)
    file = tmp_path / "model.onnx"
    file.write_bytes(
        b"\x80\x04\x95\x1d\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02ls\x94\x85\x94R\x94."
    )
    assert "a pickle" in str(why_not_onnx(file))


def test_a_bomb_is_decompressed_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.onnx"
    seen: list[int] = []
    monkeypatch.setattr("millstream.services.ingest.file_kind._kind_of", lambda head, _: seen.append(len(head)))
    for compress in (gzip.compress, bz2.compress, lzma.compress):
        file.write_bytes(compress(bytes(50 << 20)))
        why_not_onnx(file)
    assert seen
    assert max(seen) <= HEAD_BYTES


def test_a_long_field_list_is_left_to_the_model_check(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"\x08\x07" + b"\x42\x00" * 50_000)
    assert why_not_onnx(file) is None


def test_unknown_members_say_nothing() -> None:
    assert why_no_model([]) is None
    assert why_no_model(["readme", "a/b.md"]) is None


def test_a_file_that_cannot_be_read_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        why_not_onnx(tmp_path / "nothing")
