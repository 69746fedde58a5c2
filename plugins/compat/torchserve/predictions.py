"""Reads bodies of TorchServe's predictions in every form that fits the signature, and writes replies as JSON. Pure.

In TorchServe a handler of the model decides the form.

multipart ─> each part is an input, `data` is the only one ─┐
JSON      ─> the only input's value, or {input: value} ─────┼─> Inputs, and whether it was one row without the rows
the rest  ─> CSV, numpy's format, or the only input's bytes ┘
Source: pytorch/serve, "Inference API", and its base handlers (vision, text: `data` or `body`).
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from millstream.gateway.http.multipart import MultipartReader, Sink
from millstream.gateway.tensors import forms
from millstream.gateway.tensors.forms import media_type
from millstream.gateway.tensors.input_plans import CheckedInput, InputPlans, Inputs, join, raw_tensor
from millstream.gateway.tensors.inputs import InputPlan, InputTensor
from millstream.gateway.tensors.json_text import JsonLimits, parse
from millstream.gateway.tensors.named_columns import read_named
from millstream.gateway.tensors.nested_lists import from_array, is_b64, lacks_rows, row_of_lists
from millstream.gateway.tensors.number_list import NumberList
from millstream.gateway.tensors.outputs import OutputTensor, answered, json_of, rows_of
from millstream.gateway.tensors.prepared import expect_tensors
from millstream.gateway.tensors.rows_json import read_predict
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import BYTES, encode_elements
from millstream.services.model.signature import Signature

_DATA = ("data", "body")  # keys under which TorchServe's handlers look for the request
_NUMPY_MAGIC = b"\x93NUMPY"
_FORM = "multipart/form-data"
#: content types that clients send whatever the content is
_UNSPECIFIC = frozenset({"", "application/x-www-form-urlencoded", "application/octet-stream", "text/plain"})


class Prediction(NamedTuple):
    """The inputs of a request. `single`: it had no dimension for the rows, so its reply gets none."""

    inputs: Inputs
    single: bool


def read(plans: InputPlans, content_type: str, body: bytes) -> Prediction:
    """Return the inputs in a body. Raises Failure: INVALID, ENCODING (the content type is not supported)."""
    kind = forms.media_type(content_type) if content_type.strip() else ""
    if kind == _FORM:
        return _read_form(plans, parts_of(content_type, body))
    if kind == forms.JSON:
        return _read_value(plans, parse(body, plans.json_limits, number_lists=True))
    if kind in {forms.JSON_LINES, forms.CSV, forms.NPY}:
        return Prediction(forms.reader(kind)(plans, body).inputs, single=False)
    if kind not in _UNSPECIFIC and not _takes_bytes(plans):
        forms.reader(kind)  # raises the failure that lists the supported types
    return _read_raw(plans, _only(plans), body)


def _takes_bytes(plans: InputPlans) -> bool:
    return len(plans) == 1 and _only(plans).datatype == BYTES


def _only(plans: InputPlans) -> InputPlan:
    if len(plans) != 1:
        names = ", ".join(plan.name for plan in plans)
        raise invalid(
            f"the model takes {len(plans)} inputs ({names}): send a JSON object, or a form with a part for each"
        )
    return next(iter(plans))


def _read_form(plans: InputPlans, parts: Mapping[str, bytes]) -> Prediction:
    names = set(parts)
    if len(plans) == 1 and len(parts) == 1 and (names <= set(_DATA) or names == {_only(plans).name}):
        return _read_raw(plans, _only(plans), next(iter(parts.values())))
    read = {name: _read_part(plans.named(name), part, plans.json_limits) for name, part in parts.items()}
    return Prediction(
        join(plans, {name: found for name, (found, _) in read.items()}), all(one for _, one in read.values())
    )


def _read_raw(plans: InputPlans, plan: InputPlan, part: bytes) -> Prediction:
    if plan.datatype != BYTES and not part.startswith(_NUMPY_MAGIC):
        document = _parsed(part, plans.json_limits)
        if document is not None:
            return _read_value(plans, document)
    found, single = _read_part(plan, part, plans.json_limits)
    return Prediction(join(plans, {plan.name: found}), single)


def begins_json(body: bytes) -> bool:
    """Whether a body, whose content type does not tell, begins like a list or an object of JSON."""
    return body.removeprefix(BOM_UTF8).lstrip()[:1] in {b"[", b"{"}


def _parsed(part: bytes, limits: JsonLimits) -> Any:
    """Return the JSON value in `part`; None if it is not JSON. The content type does not tell."""
    if not begins_json(part):
        return None
    try:
        return parse(part, limits, number_lists=True)
    except Failure as failure:
        if failure.code is Code.TOO_LARGE:
            raise
        return None


def _read_part(plan: InputPlan, part: bytes, limits: JsonLimits) -> tuple[CheckedInput, bool]:
    """Return one input, and whether it lacks the rows: one element of BYTES, an array, JSON, or a raw tensor."""
    if plan.datatype == BYTES:
        extent = plan.fit(BYTES, (1,) * len(plan.shape))
        raw = encode_elements([part])
        return CheckedInput(extent, InputTensor(extent.shape, raw, len(raw))), True
    if part.startswith(_NUMPY_MAGIC):
        array = forms.array_of(part)
        single = array.ndim == len(plan.shape) - 1
        return from_array(plan, array[None] if single else array), single
    document = _parsed(part, limits)
    if document is not None:
        return row_of_lists(plan, document), _is_single(plan, document)
    extent = plan.deduce(len(part))
    return CheckedInput(extent, raw_tensor(plan, extent, memoryview(part))), True


def _read_value(plans: InputPlans, document: Any) -> Prediction:
    if type(document) is dict and not is_b64(document):
        names = set(document)
        expect_tensors(plans, names)
        if names & {"instances", "inputs"} and names.isdisjoint(plans.by_name):
            return Prediction(read_predict(plans, document)[0], single=False)
        own = names <= plans.by_name.keys()
        if plans.columns is not None and plans.columns.any_of(names) and not (own and len(plans) == 1):
            single = all(type(value) not in {list, NumberList} for value in document.values())
            rows = {name: [value] for name, value in document.items()} if single else document
            return Prediction(read_named(plans, rows), single)
        if own or len(plans) != 1:
            single = all(_is_single(plans.named(name), value) for name, value in document.items())
            return Prediction(read_named(plans, document, row_of_lists), single)
        key = next((key for key in _DATA if key in document), None)
        if key is None or len(names) != 1:
            raise invalid(f"the JSON object has one member, '{_only(plans).name}' or 'data'")
        document = document[key]
    plan = _only(plans)
    return Prediction(join(plans, {plan.name: row_of_lists(plan, document)}), _is_single(plan, document))


def _is_single(plan: InputPlan, value: object) -> bool:
    """Whether `value` lacks the dimension of the rows."""
    if type(value) is NumberList:
        return lacks_rows(plan, value.rank)
    rank = 0
    while type(value) is list:
        rank += 1
        value = value[0] if value else None
    return lacks_rows(plan, rank)


def write(signature: Signature, outputs: Sequence[OutputTensor], *, single: bool) -> bytes:
    """Return the only output, or all by name, as JSON. Raises Failure(INVALID) for bytes that are not text."""
    if single and signature.batching:
        outputs = [rows_of(output)[0] for output in outputs]
    texts = {spec.name: json_of(spec, output) for spec, output in answered(signature, outputs)}
    if len(texts) == 1:
        return next(iter(texts.values()))
    return b"{%b}" % b",".join([b"%b:%b" % (orjson.dumps(name), text) for name, text in texts.items()])


#: inputs and outputs of a handler: whole bodies (plugins/functions/archive_handlers.py)
_HANDLED = (("body", "content_type"), ("response", "content_type", "status"))
#: what an answer's content type is made of; others could end its header
_CONTENT_TYPE = re.compile(r"[\w.+-]{1,60}/[\w.+-]{1,60}(\s*;[ -~]{1,120})?", re.ASCII)


def is_handled(signature: Signature) -> bool:
    """Return whether a version takes and answers bodies as they are: a handler of TorchServe reads and writes them."""
    specs = (signature.inputs, signature.outputs)
    return tuple(tuple(spec.name for spec in one) for one in specs) == _HANDLED


def handled(plans: InputPlans, content_type: str, body: bytes) -> Inputs:
    """Return the inputs of a handler. Raises Failure."""
    given = (("body", body), ("content_type", content_type.encode()))
    return join(plans, {name: _read_part(plans.named(name), part, plans.json_limits)[0] for name, part in given})


def handler_answer(outputs: Sequence[OutputTensor]) -> tuple[bytes, str, int]:
    """Return the body, the content type and the status that a handler answered."""
    (body,), (kind,), status = (output.array for output in outputs)
    text = bytes(kind).decode("latin-1")
    return bytes(body), text if _CONTENT_TYPE.fullmatch(text) else "application/octet-stream", int(status[0])


PARTS_MAX = 64


def only_part(content_type: str, body: bytes) -> bytes:
    """Return a body, or the one part of a form, without its form. Raises Failure(INVALID) for a form that is broken."""
    if media_type(content_type) != _FORM:
        return body
    parts = parts_of(content_type, body)
    return next(iter(parts.values())) if len(parts) == 1 else b""


def parts_of(content_type: str, body: bytes) -> dict[str, bytes]:
    """Return each part's bytes, by name. Raises Failure(INVALID) for a form that is broken or has too many parts."""
    pieces: dict[str, list[bytes]] = {}

    def open_part(name: str) -> Sink:
        if len(pieces) == PARTS_MAX:
            raise invalid(f"the form has more than {PARTS_MAX} parts")
        pieces[name] = []
        return pieces[name].append

    reader = MultipartReader(content_type, open_part)
    reader.feed(body)
    reader.close()
    return {name: b"".join(of_part) for name, of_part in pieces.items()}
