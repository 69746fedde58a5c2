"""Shows and saves the outputs of `predict`.

outputs by name ─┬─> printed arrays
                 ├─> .npz
                 └─> .csv, .jsonl, .parquet: a table with a line for each row of the input
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from millstream.client.cli.terminal import escape, results
from millstream.client.inference import DecodedReply, as_text, row_columns
from millstream.client.tensors import Array
from millstream.services.errors import invalid

if TYPE_CHECKING:
    from rich.console import Console


def save(path: Path, outputs: Mapping[str, Array]) -> None:
    """Write outputs in the format of the file's suffix. Raises Failure(INVALID)."""
    texts = {name: as_text(array) for name, array in outputs.items()}
    write = {".csv": _write_csv, ".jsonl": _write_json_lines, ".parquet": _write_parquet}.get(path.suffix, _write_npz)
    try:
        write(path, texts)
    except OSError as error:
        raise invalid(f"--output {path}: {error.strerror or error}") from error


def _write_npz(path: Path, outputs: Mapping[str, Array]) -> None:
    arrays = {
        name: np.array(array.tolist(), None if array.size else str) if array.dtype == object else array
        for name, array in outputs.items()
    }
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _write_csv(path: Path, outputs: Mapping[str, Array]) -> None:
    columns = row_columns(outputs, None)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))


def _write_json_lines(path: Path, outputs: Mapping[str, Array]) -> None:
    columns = row_columns(outputs, None, wide=False)
    with path.open("w", encoding="utf-8") as file:
        for row in zip(*(column.tolist() for column in columns.values()), strict=True):
            file.write(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False, default=_shown) + "\n")


def _write_parquet(path: Path, outputs: Mapping[str, Array]) -> None:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise invalid("a .parquet file is written by pyarrow, which is missing here: pip install pyarrow") from error
    columns = {name: list(column) for name, column in row_columns(outputs, None).items()}
    parquet.write_table(pa.Table.from_pydict(columns), path)


def show(answer: DecodedReply, saved: Path | None) -> None:
    """Print the outputs of a reply, and where they were saved."""
    console = results()
    document = answer.document
    console.print(f"[bold]{escape(str(document.get('model_name')))}[/] version {document.get('model_version')}")
    datatypes = {tensor["name"]: tensor["datatype"] for tensor in document["outputs"]}
    for name, array in answer.outputs.items():
        show_array(console, name, datatypes[name], array)
    if saved is not None:
        console.print(f"\nsaved to {escape(str(saved))}")


def show_array(console: Console, name: str, datatype: str, array: Array) -> None:
    """Print an array below its name, datatype and shape; the middle of a large one is left out."""
    console.print(f"\n[bold cyan]{escape(name)}[/]  [dim]{datatype or array.dtype} {list(array.shape)}[/]")
    if array.dtype == object:
        array = np.array([_shown(element) for element in array.ravel()]).reshape(array.shape)
    with np.printoptions(precision=5, suppress=True, threshold=200, linewidth=max(30, min(console.width, 120))):
        console.print(str(array), markup=False)


def _shown(element: bytes | str) -> str:
    """Return an element of a BYTES output, which is `str` in a reply with JSON tensors."""
    return element if isinstance(element, str) else element.decode(errors="backslashreplace")
