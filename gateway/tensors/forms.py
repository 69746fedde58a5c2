"""Forms of bodies that several protocols share: JSON in row or column form, lines of JSON or CSV, numpy's file.

Content-Type ─> reader ─> Inputs        outputs ─> write ─> the form that the client accepts        Pure.
Source: SageMaker, "Common Data Formats for Inference"; numpy, "NPY format".
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from millstream.gateway.tensors.input_plans import CheckedInput, InputPlans, Inputs, join
from millstream.gateway.tensors.inputs import InputPlan
from millstream.gateway.tensors.json_document import excerpt
from millstream.gateway.tensors.json_text import DEFAULT_LIMITS, JsonLimits, parse, parse_lines
from millstream.gateway.tensors.nested_lists import from_array, from_lists
from millstream.gateway.tensors.number_list import NumberList
from millstream.gateway.tensors.outputs import OutputTensor, answered, as_numbers
from millstream.gateway.tensors.rows_json import read_instances, read_predict, write_lines, write_predict
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import BYTES, ELEMENTS_MAX, FLOATS
from millstream.services.model.signature import Signature

JSON = "application/json"
JSON_LINES = "application/jsonlines"
CSV = "text/csv"
NPY = "application/x-npy"

_HEADER_BYTES_MAX = 10_000  # of a file in numpy's format; a longer header is refused
_DIMS_MAX = 32  # dimensions of an array in every version of numpy


#: other names of JSON_LINES
_JSON_LINES_TOO = frozenset(
    {"application/x-jsonlines", "application/jsonl", "application/x-ndjson", "application/ndjson"}
)


#: the parameter of text/csv that says whether the first line has names (RFC 4180)
_HEADER = re.compile(r""";\s*header\s*=\s*"?(present|absent)\b""", re.IGNORECASE)
#: fields that may be values of a column of numbers or booleans
_NO_NAME = re.compile(r"[+-]?[\d.].*|[+-]?inf(inity)?|-?nan|n/?a|null|none|true|false|[-?]*")


class ParsedBody(NamedTuple):
    """A parsed body."""

    inputs: Inputs
    row_form: bool  # whether a JSON reply to it has the row form


def media_type(value: str | None) -> str:
    """Return the media type in a Content-Type header; JSON if there is no header, JSON_LINES for its other names."""
    kind = (value or "").partition(";")[0].strip().lower() or JSON
    return JSON_LINES if kind in _JSON_LINES_TOO else kind


def reader(content_type: str) -> Callable[[InputPlans, bytes], ParsedBody]:
    """Return the function that reads bodies of this type. Raises Failure(ENCODING)."""
    read = _READERS.get(media_type(content_type))
    if read is _READERS[CSV] and (said := _HEADER.search(content_type)):
        return _hinting(partial(_read_csv, header=said[1].lower() == "present"))
    if read is None:
        known = ", ".join(_READERS)
        raise Failure(Code.ENCODING, f"Content-Type '{excerpt(content_type)}' is not taken; these are: {known}")
    return read


def parse_json(body: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> Any:
    """Return the value of a JSON body; long lists of numbers become NumberLists. Raises Failure: INVALID, TOO_LARGE."""
    return parse(body, limits, number_lists=True)


def parse_document(content_type: str, body: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> Any:
    """Return the value of a body of JSON, or of lines of JSON: the list of them. Raises Failure: INVALID, TOO_LARGE."""
    return parse_json(body, limits) if media_type(content_type) == JSON else parse_lines(body, limits)


def from_json(plans: InputPlans, document: Any) -> ParsedBody:
    """Return the inputs in a document of row or column form, or in a list of instances. Raises Failure(INVALID)."""
    if type(document) is list or type(document) is NumberList:
        return ParsedBody(read_instances(plans, document), row_form=True)
    if type(document) is not dict:
        raise invalid("the body is a JSON object with 'instances' or 'inputs', or a list of instances")
    return ParsedBody(*read_predict(plans, document))


def _read_csv(plans: InputPlans, body: bytes, header: bool | None = None) -> ParsedBody:
    """Return the inputs in a CSV. `header`: whether its first line has names; None: the line shows it."""
    rows = _csv_rows(body)
    if header is None:
        header = _has_header(plans, rows[0][1])
    if header and plans.columns is not None:
        return ParsedBody(plans.columns.of_texts(*(row for _, row in rows)), row_form=True)
    names = rows.pop(0)[1] if header else []
    if not rows:
        raise invalid("the CSV has no rows after its line of names")
    if header and len(plans) > 1:
        return ParsedBody(_by_name(plans, names, rows), row_form=True)
    plan = _single_input(plans, CSV)
    cells = [[_cell(plan, cell, line, column) for column, cell in enumerate(row)] for line, row in rows]
    return ParsedBody(_one_input(plans, plan, from_lists(plan, _nest_rows(plan, cells))), row_form=True)


def _has_header(plans: InputPlans, first: list[str]) -> bool:
    """Return whether the first line of a CSV has names rather than values. Raises Failure(INVALID) if it may have both.

    The names of columns that the model does not know are not checked: such a line has no field that could be a value.
    """
    if plans.columns is not None:
        return plans.columns.are_header(first)
    if len(plans) > 1:
        return not set(first).isdisjoint(plans.by_name)
    plan = _single_input(plans, CSV)
    if plan.datatype != BYTES:
        return not any(_NO_NAME.fullmatch(cell.strip().lower()) for cell in first)
    if first == [plan.name]:
        raise invalid(
            f"'{plan.name}' in the first line of the CSV may be a name or a text: say which in the Content-Type, "
            f"{CSV}; header=present or {CSV}; header=absent"
        )
    return False


def _by_name(plans: InputPlans, names: list[str], rows: list[tuple[int, list[str]]]) -> Inputs:
    """Return the inputs of a version of several, each a column of a CSV."""
    found: dict[str, CheckedInput] = {}
    for column, name in enumerate(names):
        plan = plans.named(name)
        if name in found:
            raise plans.duplicate(plan)
        found[name] = from_lists(plan, [_cell(plan, row[column], line, column) for line, row in rows])
    return join(plans, found)


def _csv_rows(body: bytes) -> list[tuple[int, list[str]]]:
    """Return the lines of a CSV that are not empty, with their numbers, all of one width. Raises Failure(INVALID)."""
    try:
        text = body.decode("utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        rows = [(reader.line_num, row) for row in reader if row]
    except UnicodeDecodeError:
        raise invalid("the CSV is not UTF-8") from None
    except csv.Error as error:
        raise invalid(f"the CSV cannot be read: {error}") from None
    if not rows:
        raise invalid("the CSV has no rows")
    width = len(rows[0][1])
    for line, row in rows:
        if len(row) != width:
            raise invalid(f"line {line} of the CSV has {len(row)} columns, the first has {width}")
    return rows


def _cell(plan: InputPlan, cell: str, line: int, column: int) -> Any:
    if plan.datatype == BYTES:
        return cell
    if plan.datatype in FLOATS and not cell.strip():
        return None  # NaN, as pandas reads and writes it
    try:
        if "_" in cell:  # an underscore between digits is Python's notation, not CSV's
            raise ValueError
        if plan.datatype == "BOOL":
            return {"true": True, "false": False, "1": True, "0": False}[cell.strip().lower()]
        return float(cell) if plan.datatype in FLOATS else int(cell)
    except (ValueError, KeyError):
        raise invalid(f"line {line} of the CSV, column {column + 1}: '{excerpt(cell)}' is no {plan.datatype}") from None


def _nest_rows(plan: InputPlan, rows: list[list[Any]]) -> Any:
    """Return the lines nested as the input is: a row may be one column, or its columns may fill several dimensions."""
    inner = plan.shape[1:]
    if len(inner) > 1 and -1 not in inner and prod(inner) == len(rows[0]):
        table = np.empty((len(rows), len(rows[0])), object)
        table[:] = rows
        return table.reshape((len(rows), *inner)).tolist()
    return rows


def _read_npy(plans: InputPlans, body: bytes) -> ParsedBody:
    plan = _single_input(plans, NPY)
    return ParsedBody(_one_input(plans, plan, from_array(plan, array_of(body))), row_form=True)


def array_of(body: bytes) -> np.ndarray[Any, Any]:
    """Return the array in a file of numpy's format, as a view. Raises Failure(INVALID).

    np.load is not used: it allocates the size in the header before it reads the data.
    """
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        if version not in {(1, 0), (2, 0)}:
            raise invalid(f"version {version[0]}.{version[1]} of numpy's format is not read: save with version 1.0")
        shape, fortran_order, dtype = read(file, max_header_size=_HEADER_BYTES_MAX)
    except Failure:
        raise
    except Exception as error:  # numpy evaluates the header with Python's parser, which raises many exceptions
        raise invalid(f"the body is no array in numpy's format: {excerpt(str(error).partition(chr(10))[0])}") from None
    if dtype.hasobject or dtype.fields or dtype.subdtype or not dtype.itemsize:
        raise invalid(f"an array of {excerpt(str(dtype))} is not taken: numbers, booleans or strings alone")
    _check_shape(shape, dtype.itemsize)
    data = memoryview(body)[file.tell() :]
    if prod(shape) * dtype.itemsize != len(data):
        raise invalid(f"the array's header says {prod(shape) * dtype.itemsize} bytes, {len(data)} are there")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran_order else "C")


def _check_shape(shape: tuple[Any, ...], item_bytes: int) -> None:
    """Raise Failure(INVALID) for a shape that no array can have.

    Numpy's reader takes any literal as a dimension, and numpy raises for sizes that overflow even if a dimension is 0.
    """
    if len(shape) > _DIMS_MAX:
        raise invalid(f"the array has {len(shape)} dimensions: at most {_DIMS_MAX}")
    if any(type(dim) is not int or not 0 <= dim <= ELEMENTS_MAX for dim in shape):
        raise invalid(f"the array's shape {excerpt(str(shape))} is not taken")
    if prod(dim or 1 for dim in shape) * item_bytes > ELEMENTS_MAX:
        raise invalid(f"the array's shape {excerpt(str(shape))} is larger than any memory")


def _single_input(plans: InputPlans, form: str) -> InputPlan:
    if len(plans) != 1:
        header = ", or CSV that begins with a line of their names"
        raise invalid(f"{form} is for models of one input; this one takes {len(plans)}: send JSON{header}")
    return next(iter(plans))


def _one_input(plans: InputPlans, plan: InputPlan, checked: CheckedInput) -> Inputs:
    return join(plans, {plan.name: checked})


def _hinting(read: Callable[[InputPlans, bytes], ParsedBody]) -> Callable[[InputPlans, bytes], ParsedBody]:
    """Return a reader of a form of tensors: its failures say how texts or files are sent, if the version takes them."""

    def read_hinting(plans: InputPlans, body: bytes) -> ParsedBody:
        try:
            return read(plans, body)
        except Failure as failure:
            if failure.code is not Code.INVALID or not plans.prepared_hint:
                raise
            raise invalid(f"{failure.message}{plans.prepared_hint}") from None

    return read_hinting


_READERS: dict[str, Callable[[InputPlans, bytes], ParsedBody]] = {
    JSON: lambda plans, body: from_json(plans, parse_json(body, plans.json_limits)),
    JSON_LINES: lambda plans, body: from_json(plans, parse_lines(body, plans.json_limits)),
    CSV: _hinting(_read_csv),
    NPY: _hinting(_read_npy),
}


# --- replies ---


def write(signature: Signature, outputs: Sequence[OutputTensor], form: str, *, row_form: bool) -> bytes:
    """Return the outputs in `form`. Raises Failure(INVALID) for several outputs: CSV and numpy's format hold one."""
    if form == JSON:
        return write_predict(signature, outputs, row_form=row_form)
    if form == JSON_LINES:
        return write_lines(signature, outputs)
    wanted = [output for _, output in answered(signature, outputs)]
    if len(wanted) != 1:
        raise invalid(f"{form} holds one output, and the model gives {len(wanted)}: accept {JSON}")
    return _write_csv(wanted[0]) if form == CSV else _write_npy(wanted[0])


def _write_csv(output: OutputTensor) -> bytes:
    """Return a line for each index of dimension 0, with all elements of that index."""
    lines = output.shape[0] if output.shape else 1
    flat: list[Any]
    if isinstance(output.array, list):
        try:
            flat = [element.decode() for element in output.array]
        except UnicodeDecodeError:
            raise invalid(f"the output holds bytes that are not UTF-8: accept {JSON}") from None
    else:
        flat = [str(value) for value in as_numbers(output).reshape(-1)]
    width = len(flat) // lines if lines else 0
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(flat[at * width : (at + 1) * width] for at in range(lines))
    return text.getvalue().encode()


def _write_npy(output: OutputTensor) -> bytes:
    if isinstance(output.array, list):
        array = np.array(output.array, np.bytes_).reshape(output.shape)
    else:
        array = as_numbers(output)
    file = io.BytesIO()
    np.lib.format.write_array(file, array, (1, 0), allow_pickle=False)
    return file.getvalue()
