"""Functions of Python as versions have them: the file, and the document that a worker loads."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

from millstream.services.model.datatypes import BYTES, NUMPY


def write(folder: Path, source: str, signature: str = "") -> Path:
    """Write a function, and return the path of its document. `signature`: as JSON."""
    (folder / "source").mkdir(parents=True, exist_ok=True)
    (folder / "source" / "service.py").write_text(dedent(source))
    document = folder / "imported" / "function.json"
    document.parent.mkdir(exist_ok=True)
    empty = {"inputs": [], "outputs": [], "batching": False}
    described = {"file": "source/service.py", "signature": json.loads(signature or json.dumps(empty)), "producer": ""}
    document.write_text(json.dumps(described))
    return document


def identity(folder: Path, datatype: str) -> Path:
    """Write a function whose output "y" is its input "x", [N, 2]."""
    hint = "list[list[str]]" if datatype == BYTES else f"Annotated[NDArray[np.{NUMPY[datatype].name}], ('rows', 2)]"
    return write(
        folder,
        f"""
        from typing import Annotated, NamedTuple
        import numpy as np
        from numpy.typing import NDArray

        class Out(NamedTuple):
            y: {hint}

        def identity(x: {hint}) -> Out:
            return Out(x)
        """,
    )


def endless(folder: Path, on: int) -> Path:
    """Write a function "x" -> "y", INT64 [N, 1], whose runs with an element `on` do not end."""
    return write(
        folder,
        f"""
        from typing import NamedTuple

        class Out(NamedTuple):
            y: list[list[int]]

        def endless(x: list[list[int]]) -> Out:
            while [{on}] in x:
                pass
            return Out(x)
        """,
    )
