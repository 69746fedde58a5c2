"""Reads the input of `predict`, a file or standard input, into a request. Its content says what it is, then its name.

.npy, .npz ─> arrays                 .parquet, CSV ─> a table               lines, for a model of texts ─> texts
JSON: a v2 body, sent unchanged; else lists, records, columns; JSON Lines   anything else ─> bytes: an image
`predict --example` makes a request of the metadata in its place: one row, the same values each time.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millstream.client.cli.failures import wrong_usage
from millstream.client.documents import Metadata, Usage
from millstream.client.inference import EncodedRequest, encode_request
from millstream.client.inputs import Given, given_inputs, takes_texts
from millstream.client.tensors import VARIABLE_SIZE, Array, random_input
from millstream.services.errors import invalid
from millstream.services.model.datatypes import BINARY_ONLY, BYTES

_NPY, _ZIP, _PARQUET = b"\x93NUMPY", b"PK\x03\x04", b"PAR1"
_JSON_LINES = {".jsonl", ".ndjson"}
_OF_TEXT = {".csv", ".tsv", ".txt", ".json"} | _JSON_LINES
_WRAPPERS = ("instances", "inputs")  # of bodies that TensorFlow Serving and Hugging Face take


class Content(NamedTuple):
    """What was read, and the suffix of the file's name; "" for standard input."""

    bytes: bytes
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class _CsvTable:
    """The columns of a file by name, as a DataFrame has them."""

    cells: dict[str, list[Any]]

    @property
    def columns(self) -> list[str]:
        return list(self.cells)

    def __getitem__(self, name: str, /) -> list[Any]:
        return self.cells[name]

    def __len__(self) -> int:
        return len(next(iter(self.cells.values())))


def read(source: str) -> Content:
    """Return the bytes of a file, or of standard input for "-". Raises UsageFailure."""
    if source == "-":
        return Content(sys.stdin.buffer.read())
    path = Path(source)
    try:
        return Content(path.read_bytes(), path.suffix.lower())
    except (OSError, ValueError) as error:
        raise wrong_usage(f"--input {source}: {getattr(error, 'strerror', None) or error}") from error


def request_from(given: Content | list[str], metadata: Metadata, *, binary_outputs: bool) -> EncodedRequest:
    """Return the request for what was read, or for texts. Raises Failure(INVALID)."""
    value = value_of(given, metadata)
    if isinstance(given, Content) and isinstance(value, dict) and _is_v2(value):
        return EncodedRequest(given.bytes.removeprefix(codecs.BOM_UTF8), None)
    return encode_request(given_inputs(metadata, value), binary_outputs=binary_outputs)


def value_of(given: Content | list[str], metadata: Metadata) -> Any:
    """Return what a caller of the Python client would pass. Raises Failure(INVALID)."""
    return _value(given, metadata) if isinstance(given, Content) else given


def _value(content: Content, metadata: Metadata) -> Any:
    if content.bytes.startswith((_NPY, _ZIP)):
        return _arrays(content.bytes)
    if content.bytes.startswith(_PARQUET):
        return _parquet(content.bytes)
    try:
        text = content.bytes.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if content.suffix in _OF_TEXT:
            raise invalid(f"the input is no UTF-8 text: {error.reason} at byte {error.start}") from None
        return content.bytes
    return _value_of_text(text, content.suffix, metadata)


def _value_of_text(text: str, suffix: str, metadata: Metadata) -> Any:
    if suffix in {".csv", ".tsv"}:
        return _table(text, metadata, "\t" if suffix == ".tsv" else "")
    if suffix != ".txt":
        document, problem = _json(text, by_line=suffix in _JSON_LINES)
        if not problem:
            return _unwrapped(document, metadata)
        if suffix in _JSON_LINES | {".json"} or (text.lstrip()[:1] in {"{", "["} and not takes_texts(metadata)):
            raise invalid(f"the input is not {'JSON Lines' if suffix in _JSON_LINES else 'JSON'}: {problem}")
    if text.strip() and (suffix == ".txt" or takes_texts(metadata)):
        return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if "\n" not in text.strip() and "," not in text:
        raise invalid("the input is neither JSON nor CSV, .npy, .npz or .parquet: see `millstream predict --help`")
    return _table(text, metadata, "")


def _json(text: str, *, by_line: bool) -> tuple[Any, str]:
    """Return the value of JSON or JSON Lines, and why there is none: "" if there is one."""
    problem = ""
    if not by_line:
        try:
            return json.loads(text), ""
        except (ValueError, RecursionError) as error:
            problem = str(error).partition(";")[0]  # then Python's own advice
        if text.lstrip()[:1] not in {"{", "[", '"'}:  # lines of numbers are CSV
            return None, problem
    try:
        return [json.loads(line) for line in text.split("\n") if line.strip()], ""
    except (ValueError, RecursionError) as error:
        return None, problem or str(error)


def _is_v2(document: dict[str, Any]) -> bool:
    inputs = document.get("inputs")
    return isinstance(inputs, list) and all(isinstance(one, dict) and "name" in one for one in inputs)


def _unwrapped(document: Any, metadata: Metadata) -> Any:
    """Return the inputs in the bodies of other servers, and the columns that `DataFrame.to_json` writes as objects."""
    if not isinstance(document, dict) or _is_v2(document):
        return document
    for name in _WRAPPERS:
        if list(document) == [name] and all(spec["name"] != name for spec in metadata["inputs"]):
            return document[name]
    columns = list(document.values())
    if columns and all(isinstance(column, dict) and column.keys() == columns[0].keys() for column in columns):
        return {name: list(column.values()) for name, column in document.items()}
    return document


def _arrays(content: bytes) -> Any:
    try:
        loaded = np.load(io.BytesIO(content), allow_pickle=False)
        if content.startswith(_NPY):
            return loaded
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except Exception as error:
        # numpy and zipfile raise many kinds of exceptions for a broken file.
        why = "it has Python objects" if "allow_pickle" in str(error) else error
        raise invalid(f"the input is not a usable .npy or .npz file: {why}") from error


def _parquet(content: bytes) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise invalid("a .parquet file is read by pyarrow, which is missing here: pip install pyarrow") from error
    try:
        table = parquet.read_table(io.BytesIO(content))
    except Exception as error:  # pyarrow has many kinds
        raise invalid(f"the input is not a usable .parquet file: {error}") from error
    # pandas writes the index of a DataFrame as a column, unless it just counts.
    return table.select([name for name in table.column_names if not name.startswith("__index_level_")])


def _table(text: str, metadata: Metadata, delimiter: str) -> Any:
    """Return CSV as a table if its first line names columns, else as rows."""
    first = text.partition("\n")[0]
    delimiter = delimiter or next((one for one in ",;\t" if one in first), ",")
    csv.field_size_limit(max(len(text), 1))  # a text may be longer than csv's own limit
    try:
        lines = [line for line in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True) if line]
    except csv.Error as error:
        raise invalid(f"the input is not CSV: {error}") from error
    for number, line in enumerate(lines, 1):
        if len(line) != len(lines[0]):
            raise invalid(f"line {number} of the CSV has {len(line)} fields, and line 1 has {len(lines[0])}")
    if not lines:
        raise invalid("the CSV has no lines")
    if _are_numbers(lines[0]):  # values, not names
        for number, line in enumerate(lines, 1):
            if not _are_numbers(line):
                raise invalid(f"line {number} of the CSV has text, and line 1 has numbers: {', '.join(line)[:80]}")
        return [_cells(line) for line in lines]
    names = [name.strip() for name in lines[0]]
    if "" in names:
        raise invalid("a column of the CSV has no name: is it the index? DataFrame.to_csv(index=False) leaves it out")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise invalid(f"the CSV has two columns '{twice}'")
    texts = {spec["name"] for spec in metadata["inputs"] if spec["datatype"] == BYTES}
    columns = {name: [line[at] for line in lines[1:]] for at, name in enumerate(names)}
    return _CsvTable({name: cells if name in texts else _cells(cells) for name, cells in columns.items()})


def _are_numbers(cells: list[str]) -> bool:
    return not any(isinstance(cell, str) for cell in _cells(cells))


def _cells(cells: list[str]) -> list[Any]:
    """Return the cells of a column as numbers, None for empty ones; as text if one is no number."""
    try:
        return [_number(cell) for cell in cells]
    except ValueError:
        return cells


def _number(cell: str) -> int | float | None:
    """Return a cell as a number; None if it is empty. Raises ValueError."""
    if not cell.strip():
        return None
    if "_" in cell:
        raise ValueError  # Python's own form of numbers
    try:
        return int(cell)
    except ValueError:
        return float(cell)


#: Larger examples are sent as binary tensors, and not shown as JSON.
JSON_ELEMENTS_MAX = 1000
#: A longer body is not shown with a call to copy.
BODY_CHARACTERS_MAX = 400
#: A signature may name any size: more than this is not made up.
ELEMENTS_MAX = 1 << 28


class Example(NamedTuple):
    """A request and its arrays by input name; `document` is its JSON, None if it has binary tensors."""

    request: EncodedRequest
    arrays: dict[str, Array]
    document: dict[str, Any] | None


def example_of(metadata: Metadata, *, binary_outputs: bool) -> Example:
    """Return an example for a model; `binary_outputs`: the reply may have binary tensors. Raises Failure(INVALID)."""
    usage = metadata.get("parameters", {}).get("usage")
    if usage is not None and usage["example"] is not None:
        return Example(EncodedRequest(json.dumps(usage["example"]).encode(), None), {}, usage["example"])
    elements = sum(_elements(spec["shape"]) for spec in metadata["inputs"])
    if elements > ELEMENTS_MAX:
        raise invalid(f"an example for {metadata['name']} would have {elements:,} values: send one of your own")
    random = np.random.default_rng(0)
    arrays = {}
    for spec in metadata["inputs"]:
        values = np.asarray(random_input(spec["datatype"], spec["shape"], 1, random))
        arrays[spec["name"]] = np.round(values, 3) if values.dtype.kind == "f" else values
    binary = any(spec["datatype"] in BINARY_ONLY for spec in (*metadata["inputs"], *metadata["outputs"]))
    if binary or elements > JSON_ELEMENTS_MAX:
        given = [Given(spec, arrays[spec["name"]]) for spec in metadata["inputs"]]
        return Example(encode_request(given, binary_outputs=binary_outputs or binary), arrays, None)
    inputs = [
        {
            "name": spec["name"],
            "shape": list(arrays[spec["name"]].shape),
            "datatype": spec["datatype"],
            "data": _data(arrays[spec["name"]], spec["datatype"]),
        }
        for spec in metadata["inputs"]
    ]
    document = {"inputs": inputs}
    return Example(EncodedRequest(json.dumps(document).encode(), None), arrays, document)


def calls_of(url: str, name: str, usage: Usage | None) -> list[str]:
    """Return commands that call a model, to be copied: with what a person has, and over HTTP.

    Args:
        url: of the server.
        name: the model's.
        usage: how it wants to be called; None: the server does not say it.
    """
    kind = usage["kind"] if usage is not None else "tensors"
    own = {"text": "--text 'some text'", "columns": "--input table.csv"}
    if usage is not None and usage.get("encoded"):
        own |= {"image": "image.jpg", "audio": "recording.wav"}
    calls = [f"millstream predict {name} {own.get(kind, '--example')}"]
    example = usage["example"] if usage is not None else None
    body = shlex.quote(json.dumps(example, ensure_ascii=True, separators=(",", ":"))) if example is not None else ""
    if body and len(body) <= BODY_CHARACTERS_MAX:
        calls.append(f"curl -s {url}/v2/models/{name}/infer -d {body}")
    return calls


def _elements(shape: list[int]) -> int:
    rows, *sizes = [VARIABLE_SIZE if size < 0 else size for size in shape] or [1]
    return (1 if shape and shape[0] < 0 else rows) * math.prod(sizes)


def _data(array: Array, datatype: str) -> list[Any]:
    if datatype == BYTES:
        return [element.decode() for element in array.ravel()]
    if datatype == "BOOL":
        return [bool(element) for element in array.ravel()]
    if array.dtype.kind == "f":
        # As written: the float32 nearest to 0.637 has more digits as a float64.
        return [round(element, 3) for element in array.ravel().tolist()]
    values: list[Any] = array.ravel().tolist()
    return values
