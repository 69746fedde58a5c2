"""Archives are unpacked inside their folder, or rejected."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.plugins.engines.torch.archive import is_program
from millstream.services.errors import Code, Failure
from millstream.services.ingest import archive
from millstream.services.ingest.archive import unpack

LIMIT = 1 << 20
Entry = tuple[str, bytes]
Pack = Callable[[Sequence[Entry]], bytes]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.fixture
def upload(tmp_path: Path) -> Path:
    return tmp_path / "upload"


def as_zip(entries: Sequence[Entry]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in entries:
            file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def as_tar(entries: Sequence[Entry], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as file:  # type: ignore[call-overload]
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def as_tar_gz(entries: Sequence[Entry]) -> bytes:
    return as_tar(entries, "w:gz")


PACKS = pytest.mark.parametrize("pack", [as_zip, as_tar, as_tar_gz])


def refused(
    upload: Path, source: Path, content: bytes, words: str, code: Code = Code.INVALID, limit: int = LIMIT
) -> None:
    upload.write_bytes(content)
    with pytest.raises(Failure) as caught:
        unpack(upload, source, limit)
    assert words in caught.value.message
    assert caught.value.code is code
    assert "\n" not in caught.value.message
    outside = [path for path in source.parent.iterdir() if path not in {upload, source}]
    assert outside == []


@pytest.mark.parametrize("content", [b"\x08\x07\x3a\0", b"any", b"P", b"\0" * 600])
def test_a_file_that_is_not_an_archive_becomes_the_model(upload: Path, source: Path, content: bytes) -> None:
    upload.write_bytes(content)
    assert unpack(upload, source, LIMIT).path == source / "model.onnx"
    assert (source / "model.onnx").read_bytes() == content
    assert not upload.exists()


@PACKS
def test_files_are_unpacked_where_they_belong(upload: Path, source: Path, pack: Pack) -> None:
    entries = [("./net.onnx", b"net"), ("data/a/weights.bin", b"\1\2\3"), ("README", b""), (".hidden.onnx", b"x")]
    upload.write_bytes(pack(entries))
    assert unpack(upload, source, LIMIT).path == source / "net.onnx"
    assert (source / "net.onnx").read_bytes() == b"net"
    assert (source / "data/a/weights.bin").read_bytes() == b"\1\2\3"
    assert (source / "README").read_bytes() == b""
    assert not upload.exists()


@PACKS
def test_model_onnx_is_served_among_several(upload: Path, source: Path, pack: Pack) -> None:
    upload.write_bytes(pack([("a.onnx", b"a"), ("model.onnx", b"m")]))
    assert unpack(upload, source, LIMIT).path == source / "model.onnx"


@PACKS
@pytest.mark.parametrize("beside", [[], [("__MACOSX/._net", b""), (".DS_Store", b"")]])
def test_the_model_may_be_in_the_one_folder_of_an_archive(
    upload: Path, source: Path, pack: Pack, beside: list[Entry]
) -> None:
    upload.write_bytes(pack([("net/model.onnx", b"m"), ("net/data/weights.bin", b"w"), *beside]))
    assert unpack(upload, source, LIMIT).path == source / "net" / "model.onnx"


@PACKS
def test_the_one_folder_of_an_archive_may_be_another_frameworks(upload: Path, source: Path, pack: Pack) -> None:
    upload.write_bytes(pack([("model/MLmodel", b"flavors"), ("model/model.pkl", b"w")]))
    assert unpack(upload, source, LIMIT).path == source / "model"


@PACKS
@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([("readme", b"")], "the archive has no model: nothing in it is known as one (readme)"),
        ([("a/net/model.onnx", b"")], "a/net/model.onnx is in a folder: push that file, or its folder"),
        ([("a/model.onnx", b""), ("b/model.onnx", b"")], "a/model.onnx is in a folder"),
        ([("net/a.onnx", b""), ("net/b.onnx", b"")], "name the one to serve model.onnx"),
        ([("config.pbtxt", b""), ("1/model.onnx", b"")], "--triton-repository"),
        ([("digits/config.pbtxt", b""), ("digits/1/model.onnx", b"")], "--triton-repository"),
        ([("a/config.pbtxt", b""), ("b/config.pbtxt", b"")], "a Triton repository of 2 models (a, b)"),
        ([("r/a/config.pbtxt", b""), ("r/b/config.pbtxt", b"")], "a Triton repository of 2 models (a, b)"),
        ([("a.onnx", b""), ("b.onnx", b"")], "name the one to serve model.onnx"),
        ([("../model.onnx", b"x")], "leads out of the archive"),
        ([("a/../../model.onnx", b"x")], "leads out of the archive"),
        ([("/tmp/model.onnx", b"x")], "leads out of the archive"),
        ([("a\\..\\model.onnx", b"x")], "leads out of the archive"),
        ([("C:model.onnx", b"x")], "leads out of the archive"),
        ([("model.onnx", b"x"), ("./model.onnx", b"y")], "twice"),
        ([("model.onnx", b"x"), ("model.onnx/weights", b"y")], "both a file and a folder"),
        ([("model.onnx/weights", b"y"), ("model.onnx", b"x")], "both a file and a folder"),
        ([("a\nb.onnx", b"x")], "control characters"),
        ([("x" * 256, b"x")], "too long"),
        ([("x/" * 600 + "y", b"x")], "too long"),
    ],
)
def test_unsafe_archives_are_refused(upload: Path, source: Path, pack: Pack, entries: list[Entry], words: str) -> None:
    refused(upload, source, pack(entries), words)


def test_an_empty_zip_is_refused(upload: Path, source: Path) -> None:
    refused(upload, source, as_zip([]), "the archive has no model: it has no files")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar_are_refused(upload: Path, source: Path, kind: bytes) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        info = tarfile.TarInfo("model.onnx")
        info.type = kind
        info.linkname = "/etc/passwd"
        file.addfile(info)
    refused(upload, source, buffer.getvalue(), "link or device")


def test_links_in_a_zip_are_refused(upload: Path, source: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        info = zipfile.ZipInfo("model.onnx")
        info.external_attr = 0o120777 << 16
        file.writestr(info, "/etc/passwd")
    refused(upload, source, buffer.getvalue(), "link or device")


def test_zip_compressions_other_than_deflate_are_rejected(upload: Path, source: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_BZIP2) as file:
        file.writestr("model.onnx", b"x")
    refused(upload, source, buffer.getvalue(), "neither deflated nor stored")


def test_an_encrypted_zip_is_refused(upload: Path, source: Path) -> None:
    content = bytearray(as_zip([("model.onnx", b"x")]))
    content[6] |= 1
    central = content.index(b"PK\1\2")
    content[central + 8] |= 1
    refused(upload, source, bytes(content), "encrypted")


@PACKS
def test_unpacking_stops_at_the_byte_limit(upload: Path, source: Path, pack: Pack) -> None:
    bomb = pack([("model.onnx", b"\0" * (LIMIT // 2)), ("b", b"\0" * (LIMIT // 2)), ("c", b"\0")])
    refused(upload, source, bomb, f"more than {LIMIT} bytes", Code.TOO_LARGE)
    assert sum(path.stat().st_size for path in source.iterdir()) <= LIMIT


@PACKS
def test_an_archive_of_exactly_the_limit_is_accepted(upload: Path, source: Path, pack: Pack) -> None:
    upload.write_bytes(pack([("model.onnx", b"\0" * LIMIT)]))
    assert unpack(upload, source, LIMIT).path.stat().st_size == LIMIT


def test_a_zip_that_lies_about_its_sizes_is_refused(upload: Path, source: Path) -> None:
    content = bytearray(as_zip([("model.onnx", b"\0" * 5000)]))
    central = content.index(b"PK\1\2")
    content[central + 24 : central + 28] = struct.pack("<I", 10)
    refused(upload, source, bytes(content), "broken or cut short")


@PACKS
def test_too_many_members_are_refused(upload: Path, source: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "ENTRIES_MAX", 10)
    refused(upload, source, pack([(f"{n}.onnx", b"") for n in range(11)]), "more than 10 members")


def test_the_kind_of_a_zip_is_found_in_few_passes_over_its_members() -> None:
    class Counted(list[str]):
        passes = 0

        def __iter__(self) -> Iterator[str]:
            self.passes += 1
            return super().__iter__()

    names = Counted(f"folder{number}/file" for number in range(100))
    assert not is_program(names)
    assert names.passes <= 2


@PACKS
def test_archives_cut_short_are_refused(upload: Path, source: Path, pack: Pack) -> None:
    noise = bytes(range(256)) * 16
    whole = pack([("model.onnx", noise), ("weights", noise)])
    refused(upload, source, whole[: len(whole) // 2], "broken or cut short")


def test_gzip_without_a_tar_is_refused(upload: Path, source: Path) -> None:
    refused(upload, source, gzip.compress(b"\x08\x07 an onnx file" * 100), "run gunzip and push the ONNX file")


@pytest.mark.parametrize("magic", [b"BZh9", b"\xfd7zXZ\0", b"7z\xbc\xaf\x27\x1c", b"\x28\xb5\x2f\xfd"])
def test_the_error_names_an_unsupported_compression(upload: Path, source: Path, magic: bytes) -> None:
    refused(upload, source, magic + b"\0" * 100, "send the ONNX file, or a zip, tar or tar.gz")


names = st.lists(
    st.sampled_from(["..", ".", "", "a", "b", "model.onnx", "~", "a\\b", "c:", "é"]), min_size=1, max_size=4
).map("/".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(names, min_size=1, max_size=4, unique=True), st.sampled_from([as_zip, as_tar]))
def test_no_member_name_escapes_the_folder(entries: list[str], pack: Pack) -> None:
    with tempfile.TemporaryDirectory() as parent:
        upload, source = Path(parent, "upload"), Path(parent, "source")
        upload.write_bytes(pack([(name, b"x") for name in entries]))
        try:
            model = unpack(upload, source, LIMIT).path
            assert model.resolve().is_relative_to(source.resolve())
        except Failure as failure:
            assert failure.code is Code.INVALID
        assert {path.name for path in Path(parent).iterdir()} <= {"upload", "source"}
        assert not any(path.is_symlink() for path in source.rglob("*"))
