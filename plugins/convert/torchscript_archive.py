"""Reads the archive of TorchScript (torch.jit.save) without PyTorch, and refuses what its load could do besides.

zip ─> members of TorchScript alone ─> pickles name tensors and its own classes alone ─> code uses PyTorch's operators

TorchScript's code is text that PyTorch compiles for its own interpreter: it reaches no Python, but it may call
operators that read and write files, and operators of libraries that are not here. Source: PyTorch 2.13,
torch/csrc/jit/serialization/{export_module,import,unpickler}.cpp.
"""

from __future__ import annotations

import pickletools
import re
import struct
import zipfile
from pathlib import Path

from millstream.services.errors import invalid

MEMBERS_MAX = 100_000
TEXT_BYTES_MAX = 64 << 20  # of all code, and of one pickle
_MEMBER = re.compile(
    r"data\.pkl|constants\.pkl|version|byteorder|\.data/(?:version|serialization_id)|\.storage_alignment"
    r"|\.format_version|code/[\w./-]+\.py(?:\.debug_pkl)?|(?:data|constants|traced_inputs)/\d+"
    r"|traced_inputs\.pkl|extra/[\w./-]+"
)
_NAMED = re.compile(
    r"__torch__\S* \w+|torch\.jit\._pickle \w+|collections OrderedDict|torch\._utils _rebuild_\w+"
    r"|torch (?:[A-Z][a-zA-Z0-9]*Storage|Tensor|Size|device|[a-z]+\d+|bool)|torch\._tensor _rebuild_from_type_v2"
)
#: operators that reach files or give up the interpreter, and namespaces of operators that PyTorch has
_FILES = re.compile(r"\btorch\.(?:from_file|save|load|hub|package)\b|\bops\.aten\.(?:from_file|save)\b")
_NAMESPACE = re.compile(r"\bops\.(\w+)\.")
_NAMESPACES = frozenset({"aten", "prim", "prims", "quantized", "torchvision", "inductor"})


def is_script_file(path: Path) -> bool:
    """Return whether a file is a zip with the layout of TorchScript. Raises OSError."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return False
        try:
            with zipfile.ZipFile(file) as archive:
                names = set(archive.namelist()[: MEMBERS_MAX + 1])
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):
            return False
    roots = {name.partition("/")[0] for name in names}
    return any({f"{root}/data.pkl", f"{root}/constants.pkl"} <= names for root in roots)


def check_script(path: Path) -> None:
    """Raise Failure(INVALID) with one line for a file that is damaged, or does more than TorchScript of a model."""
    try:
        with zipfile.ZipFile(path) as archive:
            _check(archive, path.stat().st_size)
    except (zipfile.BadZipFile, EOFError, struct.error, NotImplementedError, UnicodeDecodeError) as error:
        raise invalid(f"the TorchScript file is damaged or was cut short: {str(error)[:200]}") from error


def _check(archive: zipfile.ZipFile, size: int) -> None:
    entries = archive.infolist()
    root = entries[0].filename.partition("/")[0]
    seen: set[str] = set()
    if len(entries) > MEMBERS_MAX or sum(entry.compress_size for entry in entries) > size:
        raise invalid("the TorchScript file is damaged: its files overlap or are too many")
    if sum(entry.file_size for entry in entries) > size + TEXT_BYTES_MAX:
        raise invalid(f"the TorchScript file has more than {TEXT_BYTES_MAX} bytes of code")
    for entry in entries:
        top, _, name = entry.filename.partition("/")
        if top != root or not _MEMBER.fullmatch(name) or ".." in name:
            raise invalid(f"{entry.filename[:80]!a} is no file of TorchScript")
        if name.casefold() in seen:
            raise invalid(f"the TorchScript file has {name[:80]!a} twice")
        seen.add(name.casefold())
        compressed = entry.compress_type != zipfile.ZIP_STORED
        if (compressed and not name.startswith("code/")) or entry.flag_bits & 1:
            raise invalid(f"{name[:80]!a} is compressed or encrypted: torch.jit.save does so with code alone")
        if name.endswith(("pkl", ".py")):
            if entry.file_size > TEXT_BYTES_MAX:
                raise invalid(f"{name[:80]!a} has more than {TEXT_BYTES_MAX} bytes")
            content = archive.read(entry)
            _check_pickle(name, content) if name.endswith("pkl") else _check_code(name, content.decode())


def _check_pickle(name: str, content: bytes) -> None:
    try:
        for opcode, argument, _ in pickletools.genops(content):
            hidden = opcode.name in {"STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}
            if hidden or (opcode.name == "GLOBAL" and not _NAMED.fullmatch(str(argument))):
                raise invalid(
                    f"{name[:80]!a} names {str(argument)[:80]!a}, which is no part of TorchScript and could execute "
                    "anything: save the model with torch.jit.save"
                )
    except ValueError as error:
        raise invalid(f"{name[:80]!a} is damaged: {str(error)[:100]}") from error


def _check_code(name: str, code: str) -> None:
    reached = _FILES.search(code)
    if reached is not None:
        raise invalid(f"{name[:80]!a} calls {reached[0]}, which reads or writes files")
    for namespace in _NAMESPACE.findall(code):
        if namespace not in _NAMESPACES:
            raise invalid(f"{name[:80]!a} calls operators of {namespace[:80]!a}, a library that PyTorch does not have")
