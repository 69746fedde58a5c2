"""From an uploaded file to the version's source folder.

upload ─> zip, tar or tar.gz? ─yes─> every member checked, counted and written below source/
                              ─no──> source/model.onnx, whatever it is: the checker reads it next
Nothing in an archive is believed: not its sizes, not its names, not its types. Sources: APPNOTE.TXT 4.4 (zip),
POSIX.1-2001 pax (tar).
"""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple, Protocol

from millstream.services.errors import Code, Failure, invalid

ENTRIES_MAX = 10_000
PATH_BYTES_MAX = 1024
_COMPONENT_BYTES_MAX = 255
_CHUNK_BYTES = 1 << 20
_ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
_GZIP_MAGIC = b"\x1f\x8b"
_OTHER_MAGIC = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"7z\xbc\xaf": "7z", b"\x28\xb5\x2f\xfd": "zstd", b"Rar!": "rar"}
_BROKEN = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    struct.error,
    ValueError,
    OverflowError,
)


class Member(NamedTuple):
    """One entry of an archive. `data` is None for a folder; its bytes are read only while it is the current one."""

    name: str
    data: IO[bytes] | None


class _OpenArchive(Protocol):
    def __call__(self, upload: Path) -> Iterator[Member]: ...


def unpack(upload: Path, source: Path, bytes_max: int) -> Path:
    """Turn `upload` into the files of the new folder `source`; returns the ONNX file to serve. `upload` is consumed.

    Raises Failure: INVALID (broken, unsafe, or not exactly one model), TOO_LARGE (over `bytes_max` unpacked bytes).
    """
    source.mkdir(parents=True)
    opened = _kind(upload)
    if opened is None:
        model = source / "model.onnx"
        shutil.move(
            upload, model, shutil.copyfile
        )  # the first version of Landlock knows no renaming from folder to folder
        return model
    try:
        _write_members(opened(upload), source, bytes_max)
    except _BROKEN as error:
        raise invalid(f"the archive is broken or cut short: {error or type(error).__name__}") from error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise invalid("the archive is broken: it points outside itself") from error
    except (NotImplementedError, RuntimeError) as error:  # what zipfile raises for encryption and rare compressions
        raise invalid(f"the archive cannot be read: {error}") from error
    upload.unlink()
    return _model_of(source)


def _kind(upload: Path) -> _OpenArchive | None:
    with upload.open("rb") as file:
        head = file.read(512)
    if head.startswith(_ZIP_MAGIC):
        return _zip_members
    if head.startswith(_GZIP_MAGIC):
        return _gzip_tar_members
    if head[257:262] == b"ustar":
        return _plain_tar_members
    for magic, name in _OTHER_MAGIC.items():
        if head.startswith(magic):
            raise invalid(f"the upload is compressed with {name}: send the ONNX file, or a zip, tar or tar.gz")
    return None


def _zip_members(upload: Path) -> Iterator[Member]:
    with zipfile.ZipFile(upload) as archive:
        for entry in archive.infolist():
            kind = stat.S_IFMT(entry.external_attr >> 16)
            if kind not in {0, stat.S_IFREG, stat.S_IFDIR}:
                raise invalid(
                    f"archive member {_shown(entry.filename)} is a link or device: only plain files are taken"
                )
            if entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
                raise invalid(
                    f"archive member {_shown(entry.filename)} is not deflated or stored: zip it without options"
                )
            if entry.filename.endswith("/"):
                yield Member(entry.filename, None)
                continue
            with archive.open(entry) as data:
                yield Member(entry.filename, data)


def _plain_tar_members(upload: Path) -> Iterator[Member]:
    with tarfile.open(upload, mode="r|") as archive:
        yield from _tar_members(archive)


def _gzip_tar_members(upload: Path) -> Iterator[Member]:
    with tarfile.open(upload, mode="r|gz") as archive:
        yield from _tar_members(archive)


def _tar_members(archive: tarfile.TarFile) -> Iterator[Member]:
    for entry in archive:
        if entry.isdir():
            yield Member(entry.name, None)
            continue
        data = archive.extractfile(entry) if entry.isfile() else None
        if data is None:
            raise invalid(f"archive member {_shown(entry.name)} is a link or device: only plain files are taken")
        with data:
            yield Member(entry.name, data)


def _write_members(members: Iterator[Member], source: Path, bytes_max: int) -> None:
    left = bytes_max
    seen: set[PurePosixPath] = set()
    for count, member in enumerate(members, 1):
        if count > ENTRIES_MAX:
            raise invalid(f"the archive has more than {ENTRIES_MAX} members")
        path = _safe(member.name)
        target = source / path
        if member.data is None:
            _make_folder(target, member.name)
            continue
        if path in seen:
            raise invalid(f"archive member {_shown(member.name)} is there twice")
        seen.add(path)
        _make_folder(target.parent, member.name)
        left -= _write(member.data, target, member.name, left, bytes_max)


def _safe(name: str) -> PurePosixPath:
    """The member's relative path. Raises Failure(INVALID) for everything that could leave, or confuse, the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or name[1:2] == ":":
        raise invalid(f"archive member {_shown(name)} has a path that leads out of the archive")
    encoded = name.encode("utf-8", "surrogateescape")
    if not name.isprintable() or len(encoded) > PATH_BYTES_MAX:
        raise invalid(f"archive member {_shown(name)} has a name that is too long or has control characters")
    if any(len(part.encode("utf-8", "surrogateescape")) > _COMPONENT_BYTES_MAX for part in path.parts):
        raise invalid(f"archive member {_shown(name)} has a name that is too long or has control characters")
    return path


def _make_folder(folder: Path, name: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise invalid(f"archive member {_shown(name)} is both a file and a folder") from None


def _write(data: IO[bytes], target: Path, name: str, left: int, bytes_max: int) -> int:
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except (FileExistsError, IsADirectoryError):
        raise invalid(f"archive member {_shown(name)} is both a file and a folder") from None
    written = 0
    with os.fdopen(descriptor, "wb") as file:
        while chunk := data.read(min(_CHUNK_BYTES, left - written + 1)):
            written += len(chunk)
            if written > left:
                raise Failure(Code.TOO_LARGE, f"the archive unpacks to more than {bytes_max} bytes")
            file.write(chunk)
    return written


def _model_of(source: Path) -> Path:
    found = sorted(path for path in source.glob("*.onnx") if path.is_file() and not path.name.startswith("."))
    named = source / "model.onnx"
    if named in found:
        return named
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(path.name for path in found[:5])
        raise invalid(f"the archive has {len(found)} ONNX files at its top ({names}): name the one to serve model.onnx")
    deeper = next((path for path in sorted(source.rglob("*.onnx"))), None)
    hint = f"; {deeper.relative_to(source)} is in a folder: archive the folder's contents" if deeper else ""
    raise invalid(f"the archive has no .onnx file at its top{hint}")


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 80 else name[:80] + "...")
