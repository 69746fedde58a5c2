"""A function as an upload makes it and a worker runs it, without a gateway: real processes, confined."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import numpy as np

from millstream.plugins.functions.document import DOCUMENT, FunctionDocument, read_document
from millstream.plugins.functions.trial import Tried, tried
from millstream.plugins.functions.worker import Python
from millstream.services.settings import Settings
from millstream.workers.backends.base import Array, Instance


class Served(NamedTuple):
    """A function that passed its check. `folder`: of its version."""

    folder: Path
    document: FunctionDocument


def check(
    tmp_path: Path, source: str, *, name: str = "service.py", files: Mapping[str, bytes] = {}, **settings: Any
) -> Served:
    """Check the source of a function as an upload does, with `files` beside it. Raises Failure."""
    folder = tmp_path / "version"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "source").mkdir(parents=True)
    path = folder / "source" / name
    path.write_text(dedent(source))
    for beside, content in files.items():
        (folder / "source" / beside).write_bytes(content)
    asyncio.run(tried(folder, Tried(path), Settings(home=tmp_path / "home", **settings)))
    return Served(folder, read_document(folder / DOCUMENT))


@cache
def _backend() -> Python:
    """Return the one backend of this process, whose thread and descriptors would add up."""
    return Python()


@contextmanager
def loaded(served: Served) -> Iterator[Instance]:
    """Load a function as a worker does."""
    instance = _backend().load(served.folder / DOCUMENT, served.document.signature, "cpu", 1)
    try:
        yield instance
    finally:
        instance.close()


def texts(*values: str | bytes) -> Array:
    """Return a tensor of texts."""
    array = np.empty(len(values), dtype=object)
    array[:] = [value.encode() if isinstance(value, str) else value for value in values]
    return array


def answers(instance: Instance, inputs: Mapping[str, Array]) -> list[list[Any]]:
    """Run once, and return each output as a list."""
    return [array.tolist() for array in instance.run(inputs)]
