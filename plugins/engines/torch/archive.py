"""Reads the archive of a program of torch.export (.pt2) without PyTorch, and refuses pickles in it.

zip ─> layout of an archive, nothing compressed, no name twice ─> no pickle but that of the sample inputs ─> members

torch.export.load (PyTorch 2.13, torch/export/pt2_archive/_package.py) unpickles weights, constants and sample inputs
with weights_only=False, and opens libraries of AOTInductor. A program of tensors needs none of that but the sample
inputs, which torch.load takes with weights_only=True.
"""

from __future__ import annotations

import io
import json
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from millstream.services.errors import invalid

MEMBERS_MAX = 100_000  # weights are a member each
DOCUMENT_BYTES_MAX = 256 << 20  # of models/model.json, and of each other document
ARCHIVE_VERSION = "0"
MODEL = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_MEMBER = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/(?:version|serialization_id)|\.format_version"
    r"|\.storage_alignment|models/model\.json|data/sample_inputs/model\.pt|extra/[\w./-]+"
    r"|data/weights/(?:model_weights_config\.json|weight_\d+)"
    r"|data/constants/(?:model_constants_config\.json|tensor_\d+)"
)
_PAYLOAD = re.compile(r"(?:weight|tensor)_\d+")
#: what the pickle of sample inputs may name: tensors and what holds them
_SAMPLE_NAMES = re.compile(
    r"torch\._utils _rebuild_(?:tensor_v[23]|parameter)|torch\._tensor _rebuild_from_type_v2|collections OrderedDict"
    r"|torch\.storage UntypedStorage|torch (?:[A-Z][a-zA-Z0-9]*Storage|Tensor|Size|[a-z]+\d+|bool)"
)
_END = struct.Struct("<4s4H2LH")


def is_program(names: Sequence[str]) -> bool:
    """Return whether the members of a zip, by name, are those of a program."""
    present = set(names)
    roots = {name.partition("/")[0] for name in present}
    return any({f"{root}/archive_format", f"{root}/{MODEL}"} <= present for root in roots)


def is_program_file(path: Path) -> bool:
    """Return whether a file is a zip with the layout of torch.export. Raises OSError."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return False
        try:
            with zipfile.ZipFile(file) as archive:
                return is_program(archive.namelist()[: MEMBERS_MAX + 1])
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):
            return False


@contextmanager
def open_program(path: Path) -> Iterator[Any]:
    """Check the archive at `path` and yield its document, models/model.json.

    Raises Failure(INVALID) with one line if it is damaged, or if PyTorch would unpickle more than tensors. OSError.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            members = _members(archive, file)
            if members("archive_version") != ARCHIVE_VERSION.encode():
                raise invalid("the program was saved by another PyTorch: its archive_version is not 0")
            for name in _CONFIGS:
                _check_payloads(_json(members(name), name))
            _check_samples(members(_SAMPLES))
            yield _json(members(MODEL), MODEL)
    except (zipfile.BadZipFile, EOFError, struct.error, NotImplementedError, zipfile.LargeZipFile) as error:
        raise invalid(f"the program is damaged or was cut short: {' '.join(str(error).split())[:200]}") from error
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RecursionError) as error:
        raise invalid(f"the program cannot be read: {type(error).__name__}: {str(error)[:200]}") from error


def _members(archive: zipfile.ZipFile, file: IO[bytes]) -> Callable[[str], bytes]:
    """Check the archive's members; return a function that reads one by its name below the root."""
    entries = archive.infolist()
    if len(entries) > MEMBERS_MAX:
        raise invalid(f"the program has more than {MEMBERS_MAX} files")
    size = file.seek(0, 2)
    _check_end(archive, file, size)
    root = entries[0].filename.partition("/")[0] if entries else ""
    seen: set[str] = set()
    for entry in entries:
        top, _, name = entry.filename.partition("/")
        if top != root or not _MEMBER.fullmatch(name):
            raise invalid(_unexpected(name if top == root else entry.filename))
        if name.casefold() in seen:
            raise invalid(f"the program has the file {name[:80]!a} twice")
        seen.add(name.casefold())
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
            raise invalid(f"{name[:80]!a} is compressed or encrypted: torch.export.save writes neither")
    if sum(entry.file_size for entry in entries) > size:
        raise invalid("the program is damaged: its files overlap")

    def read(name: str) -> bytes:
        try:
            entry = archive.getinfo(f"{root}/{name}")
        except KeyError:
            raise invalid(f"this is no program of torch.export, or an incomplete one: it has no {name}") from None
        if entry.file_size > DOCUMENT_BYTES_MAX:
            raise invalid(f"{name} has more than {DOCUMENT_BYTES_MAX} bytes")
        return archive.read(entry)

    return read


def _unexpected(name: str) -> str:
    if name.startswith("data/aotinductor/"):
        return "the program has machine code of AOTInductor: save it with torch.export.save"
    if name.endswith(".pt") or "custom_obj" in name or "opaque_obj" in name:
        return f"{name[:80]!a} is a pickle, which could execute anything: save the program with PyTorch 2.9 or later"
    if name.startswith("models/"):
        return f"the archive has the model {name[:80]!a}: save one program with torch.export.save"
    return f"{name[:80]!a} is no file of a program of torch.export"


def _check_end(archive: zipfile.ZipFile, file: IO[bytes], size: int) -> None:
    """Refuse what two readers of zip files could read in two ways: a comment, and bytes before the first file."""
    file.seek(max(0, size - _END.size))
    magic, *_, length, offset, comment = _END.unpack(file.read(_END.size))
    begins = archive.start_dir  # where Python's reader found the directory
    whole = 0xFFFFFFFF
    if magic != b"PK\5\6" or comment or archive.comment or (offset not in {whole, begins}) or length == 0:
        raise invalid("the program is damaged: bytes precede or follow its archive")
    if offset == whole and min((entry.header_offset for entry in archive.infolist()), default=0):
        raise invalid("the program is damaged: bytes precede its archive")


def _json(content: bytes, name: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{name} is not JSON: {str(error)[:100]}") from error


def _check_payloads(document: Any) -> None:
    for name, payload in document["config"].items():
        if payload["use_pickle"] or not _PAYLOAD.fullmatch(payload["path_name"]):
            raise invalid(
                f"{str(name)[:80]!a} is a pickle, which could execute anything: only plain tensors can be served"
            )


def _check_samples(content: bytes) -> None:
    """Refuse sample inputs whose pickle names more than tensors. They are a zip of torch.save, with one pickle."""
    if not content:
        return
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            root = names[0].partition("/")[0]
            pickles = [entry for entry in entries if entry.filename == f"{root}/data.pkl"]
            if len(pickles) != 1 or len({name.casefold() for name in names}) != len(names):
                raise invalid("the program's sample inputs are not a file of torch.save")
            if any(name.endswith("constants.pkl") for name in names) or pickles[0].file_size > len(content):
                raise invalid("the program's sample inputs are not a file of torch.save")
            pickled = archive.read(pickles[0])
    except zipfile.BadZipFile as error:
        raise invalid("the program's sample inputs are not a file of torch.save") from error
    for named in _globals(pickled):
        if not _SAMPLE_NAMES.fullmatch(named):
            raise invalid(
                f"the pickle of the sample inputs names {named[:80]!a}, which could execute anything: export the "
                "program with tensors as arguments"
            )


def _globals(pickled: bytes) -> Iterator[str]:
    """Yield "module name" of each object that a pickle names; raises Failure(INVALID) where that cannot be seen."""
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name == "GLOBAL":
                yield str(argument)
            elif opcode.name in {"STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}:
                raise invalid("the pickle of the sample inputs hides what it names: save it with pickle_protocol 2")
    except ValueError as error:
        raise invalid(f"the pickle of the sample inputs is damaged: {str(error)[:100]}") from error
