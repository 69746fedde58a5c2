"""Unpacks an uploaded file into the version's source folder.

upload ─> a model of another framework (an importer recognises it)? moved to source/model
       ─> of a format that a plug-in adds, which may be a zip itself? moved to source/ with its name
       ─> known to be something else (file_kind)? ─yes─> refused with what to do
       ─> zip, tar or tar.gz? ─yes─> every member checked, counted and written below source/
                              ─no──> moved to source/model.onnx; the checker parses it next
What was unpacked is recognised as any folder is (ingest.layout); what the version does not need is removed in the end.
An archive is untrusted: the sizes, names and types that it declares are all verified. Sources: APPNOTE.TXT 4.4 (zip),
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
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple, Protocol

from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.external_data import PATH_BYTES_MAX
from millstream.services.ingest.file_kind import why_not_onnx
from millstream.services.ingest.importers import Source, find_importer
from millstream.services.ingest.layout import ENTRIES_MAX, Found, NoModel, recognise
from millstream.services.model.formats import format_of
from millstream.services.model.names import COMPONENT_BYTES_MAX, FILE, FOREIGN_FILE

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
    """One entry of an archive. `data` is None for a folder; a file's `data` is readable until the next entry."""

    name: str
    data: IO[bytes] | None


class _OpenArchive(Protocol):
    def __call__(self, upload: Path) -> Iterator[Member]: ...


def unpack(upload: Path, source: Path, bytes_max: int) -> Found:
    """Unpack `upload` into the new folder `source`, remove `upload`, and return the model.

    Args:
        upload: the uploaded bytes.
        source: the folder to make.
        bytes_max: limit on the unpacked bytes.

    Raises:
        Failure: INVALID (broken, unsafe, or not exactly one model), TOO_LARGE (over `bytes_max` unpacked bytes).
    """
    importer = find_importer(Source(upload.parent, upload))
    if importer is not None:
        return Found(source, _move(upload, source, FOREIGN_FILE), importer)
    found = format_of(upload)
    if found is not None and found.file:
        return Found(source, _move(upload, source, found.file), None)
    check_kind(upload)
    open_archive = _detect_format(upload)
    if open_archive is None:
        return Found(source, _move(upload, source, FILE), None)
    source.mkdir(parents=True)
    try:
        _write_members(open_archive(upload), source, bytes_max)
    except _BROKEN as error:
        raise invalid(f"the archive is broken or cut short: {error or type(error).__name__}") from error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise invalid("the archive is broken: it refers to bytes beyond its end") from error
    except (NotImplementedError, RuntimeError) as error:  # raised by zipfile for encryption and rare compressions
        raise invalid(f"the archive cannot be read: {error}") from error
    upload.unlink()
    try:
        return recognise(source)
    except NoModel as failure:
        raise invalid(f"the archive has no model: {failure.message}") from failure


def _move(upload: Path, source: Path, name: str) -> Path:
    source.mkdir(parents=True)
    model = source / name
    # Copied where needed: Landlock ABI 1 forbids a rename from one folder to another.
    shutil.move(upload, model, shutil.copyfile)
    return model


def check_kind(path: Path) -> None:
    """Raise Failure(INVALID) if the content of the file at `path` is known to be neither ONNX nor an archive of it."""
    why = why_not_onnx(path)
    if why is not None:
        raise invalid(why)


def _detect_format(upload: Path) -> _OpenArchive | None:
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
                    f"archive member {_quoted(entry.filename)} is a link or device: only regular files are accepted"
                )
            if entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
                raise invalid(
                    f"archive member {_quoted(entry.filename)} is neither deflated nor stored: zip it without options"
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
            raise invalid(f"archive member {_quoted(entry.name)} is a link or device: only regular files are accepted")
        with data:
            yield Member(entry.name, data)


def _write_members(members: Iterator[Member], source: Path, bytes_max: int) -> None:
    bytes_left = bytes_max
    seen: set[PurePosixPath] = set()
    for count, member in enumerate(members, 1):
        if count > ENTRIES_MAX:
            raise invalid(f"the archive has more than {ENTRIES_MAX} members")
        path = _checked_path(member.name)
        target = source / path
        if member.data is None:
            _make_folder(target, member.name)
            continue
        if path in seen:
            raise invalid(f"archive member {_quoted(member.name)} occurs twice: remove one of the two")
        seen.add(path)
        _make_folder(target.parent, member.name)
        bytes_left -= _write(member.data, target, member.name, bytes_left, bytes_max)


def _checked_path(name: str) -> PurePosixPath:
    """Return the member's relative path. Raises Failure(INVALID) if it is absolute, malformed, or leaves the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or name[1:2] == ":":
        raise invalid(f"archive member {_quoted(name)} has a path that leads out of the archive")
    encoded = name.encode("utf-8", "surrogateescape")
    if not name.isprintable() or len(encoded) > PATH_BYTES_MAX:
        raise invalid(f"archive member {_quoted(name)} has a name that is too long or has control characters")
    if any(len(part.encode("utf-8", "surrogateescape")) > COMPONENT_BYTES_MAX for part in path.parts):
        raise invalid(f"archive member {_quoted(name)} has a name that is too long or has control characters")
    return path


def _make_folder(folder: Path, name: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise invalid(f"archive member {_quoted(name)} is both a file and a folder") from None


def _write(data: IO[bytes], target: Path, name: str, bytes_left: int, bytes_max: int) -> int:
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except (FileExistsError, IsADirectoryError):
        raise invalid(f"archive member {_quoted(name)} is both a file and a folder") from None
    written = 0
    with os.fdopen(descriptor, "wb") as file:
        while chunk := data.read(min(_CHUNK_BYTES, bytes_left - written + 1)):
            written += len(chunk)
            if written > bytes_left:
                raise Failure(Code.TOO_LARGE, f"the archive unpacks to more than {bytes_max} bytes")
            file.write(chunk)
    return written


def keep_only(folder: Path, files: Collection[str]) -> None:
    """Remove everything below `folder` except `files`, then the folders left empty. Links are not followed.

    Args:
        folder: a staging folder with untrusted content.
        files: paths relative to `folder`.

    Raises:
        Failure: INTERNAL, if one of `files` is missing or is not a regular file.
        OSError: a file or folder cannot be removed.
    """
    kept = {folder / file for file in files}
    missing = set(kept)
    for parent, folders, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(parent) / name
            if path in kept and stat.S_ISREG(path.lstat().st_mode):
                missing.discard(path)
            else:
                path.unlink()
        for name in folders:
            path = Path(parent) / name
            if path.is_symlink():  # os.walk lists a link to a folder among the folders
                path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()
    if missing:
        first = str(min(missing).relative_to(folder))
        raise Failure(Code.INTERNAL, f"the model check names {first[:200]!a}, which is not a file of the upload")


def _quoted(name: str) -> str:
    return ascii(name if len(name) <= 80 else name[:80] + "...")
