"""Recognises Python as a model: a file with a function or a class, and what is beside it.

file ─> a process that imports it, confined ─> its signature ─> trial runs ─> the document that workers load
"""

from __future__ import annotations

import ast
import re
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.services.ingest.file_kind import FileKind, FileKinds
from millstream.services.ingest.importers import NETWORK, Importer, ImportOptions, Members, Source

if TYPE_CHECKING:
    from millstream.services.ingest.report import Converted, Recognised
    from millstream.services.settings import Settings

NAME = "Python"
FILE_BYTES_MAX = 4 << 20
_SUFFIX = ".py"
#: the file to serve of a folder
_MAIN = "service.py"
_CACHE = "__pycache__"
_IMPORT = re.compile(rb"^(?:import|from)[ \t]+\w", re.MULTILINE)
_DEFINITION = re.compile(rb"^(?:async[ \t]+def|def|class)[ \t]", re.MULTILINE)


class FunctionImporter(Importer):
    """Serves what a file of Python defines."""

    name = NAME
    described = True
    runs_code = True
    marks = frozenset({_MAIN})

    def recognises(self, source: Source) -> bool:
        path = source.path
        return _is_python(path / _MAIN if path.is_dir() else path)

    def members(self, folder: Path) -> Members:
        names = (one.relative_to(folder) for one in folder.rglob("*"))
        return Members([escape(str(name)) for name in names if _CACHE not in name.parts])

    def asks(self, source: Source) -> frozenset[str]:
        from millstream.plugins.functions.function_packages import asks_network

        path = source.path / _MAIN if source.path.is_dir() else source.path
        return frozenset({NETWORK} if asks_network(path) else ())

    async def run(self, folder: Path, recognised: Recognised, options: ImportOptions, settings: Settings) -> Converted:
        from millstream.plugins.functions.trial import Tried, tried

        path = folder / recognised.path
        if path.is_dir():
            path /= _MAIN
        elif path.suffix != _SUFFIX:  # an upload of one file has no name
            path = path.rename(path.with_name(_MAIN))
        return await tried(folder, Tried(path), settings)


def _without_function(head: bytes, size: int | None) -> FileKind | None:
    """Return what a file is that imports modules and defines nothing that can be served."""
    if b"\0" in head or _DEFINITION.search(head) or not _IMPORT.search(head) or (size or 0) > len(head):
        return None
    try:
        ast.parse(head)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return FileKind(
        "a file of Python without a function",
        "a Python model is a function with type hints, def predict(text: str) -> str: …, or a class with such a method",
    )


#: for what is no model, though it is Python
KINDS = FileKinds(recognise=_without_function)


def _is_python(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size > FILE_BYTES_MAX:
        return False
    content = path.read_bytes()
    if b"\0" in content or not _DEFINITION.search(content):
        return False
    if path.suffix == _SUFFIX:
        return True
    try:
        ast.parse(content)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True
