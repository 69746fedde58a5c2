"""The bytes of an inference request -> an InferCall that fits the version's signature.

body ── envelope cached? ──yes──> only the numbers are read
             └──no──> JSON document ── inputs, options checked ──> InferCall ── envelope cached

Requests of one client mostly differ only in their numbers. Everything else, the envelope, is cached, because checking
it takes longer than reading the numbers:

{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[ 1.5,2,0,4 ]}]}      JSON: prefix, numbers, suffix
{"inputs":[{"name":"x", … "parameters":{"binary_data_size":16}}]} 16 bytes          binary: the whole JSON part

Only envelopes of requests without an id are cached, after the request was decoded in full. JSON is read from left to
right, so two bodies with the same prefix and suffix around a flat list differ in that list only.

Source: Open Inference Protocol v2, REST; Triton's binary tensor data extension.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import orjson

from millstream.gateway.tensors.elements import raw_from_json
from millstream.gateway.tensors.input_plans import InputPlans, opened, raw_tensor
from millstream.gateway.tensors.inputs import ABSENT, Extent, InputPlan, InputTensor
from millstream.gateway.tensors.json_document import (
    excerpt,
    expect_parameters,
    expect_unsigned,
    raise_missing,
    raise_mistyped,
)
from millstream.gateway.tensors.json_text import parse_json
from millstream.gateway.tensors.named_columns import columns_given, from_columns, plans_of_columns
from millstream.gateway.tensors.output_options import Extensions
from millstream.gateway.tensors.outputs import VIEW_BYTES_MIN
from millstream.gateway.tensors.prepared import PreparedPlans, prepared_for
from millstream.gateway.v2.options import InferCall, Options, read_options, read_span
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import BYTES, encode_elements
from millstream.services.process.threads import run_in_thread_if_large

_HEADER_DIGITS_MAX = 19
#: Longer bodies are decoded in full, without an envelope, which bounds the cost of one parse.
_ENVELOPE_BYTES_MAX = 1 << 20
_FIELDS = "'data', 'binary_data_size' in 'parameters', 'shared_memory_region' in 'parameters'"
_NOT_NUMBERS = (ValueError, struct.error, OverflowError)

# Measured, since every request takes this path: a global is tensors faster than an attribute, an int is searched for
# faster than a bytes object of length one, tuples are joined faster than unpacked.
_E = ord("e")
_loads = orjson.loads
_new = tuple.__new__

_PREFIX_BYTES_MAX = 1024
_SUFFIX_BYTES_MAX = 512
_ENVELOPES_MAX = 256

#: prefix up to the numbers' "[", suffix from their "]" on, function that packs the shape's count of numbers, shape,
#: bytes in raw form, options
JsonEnvelope = tuple[bytes, bytes, Callable[..., bytes], tuple[int, ...], int, Options]

#: JSON part; bytes of the whole body; shape, start, end of each input in the signature's order; options
BinaryEnvelope = tuple[bytes, int, list[tuple[tuple[int, ...], int, int]], Options]

_Envelope = TypeVar("_Envelope", JsonEnvelope, BinaryEnvelope)

# In place of a number this is a string; inside a string it ends that string, and the rest is not JSON.
_PROBE = b'"~"'


@lru_cache(maxsize=1024)
def parse_header_length(value: bytes | None) -> int | None:
    """Return the number in an Inference-Header-Content-Length header, None if there is none. Raises Failure(INVALID).

    A negative number is returned: `V2Decoder.decode` refuses it with the valid range.
    """
    if value is None:
        return None
    digits = value.strip()
    if len(digits) > _HEADER_DIGITS_MAX or not digits.removeprefix(b"-").isdigit():
        raise invalid(
            f"Inference-Header-Content-Length should be a number of bytes, got: {excerpt(value.decode('latin-1'))}"
        )
    return int(digits)


class V2Decoder:
    """Decodes the requests of one version. `json_bytes_max`: limit on the JSON part; binary tensors are not counted."""

    def __init__(self, plans: InputPlans, json_bytes_max: int, extensions: Extensions | None = None) -> None:
        self._model = plans.model
        self._extensions = extensions or Extensions(plans.signature, {}, None, json_bytes_max)
        self._json_bytes_max = json_bytes_max
        self._plans = plans
        #: decodes requests that give texts or encoded files; None: the version takes tensors alone
        self.prepared = None if plans.prepared is None else V2Decoder(plans.prepared, json_bytes_max, extensions)
        self._first = next(iter(plans), None)
        self._outputs = {spec.name: index for index, spec in enumerate(plans.signature.outputs)}
        self._json: dict[bytes, JsonEnvelope] = {}
        self._binary: dict[bytes, BinaryEnvelope] = {}
        # The envelopes of the last request are compared before any is looked up.
        self._last: JsonEnvelope | None = None
        self._last_parts: BinaryEnvelope | None = None

    def decode(self, body: bytes | bytearray | memoryview, header_bytes: int | None) -> InferCall:
        """Return the request in a decompressed body; large binary tensors are views on it.

        `header_bytes`: length of its JSON part; None: the whole body is JSON. Raises Failure: INVALID; TOO_LARGE;
        UNSUPPORTED for sequences, and for shared memory where it is not allowed.
        """
        if header_bytes is None:
            if type(body) is not bytes:
                body = bytes(body)
            if len(body) > self._json_bytes_max:
                raise self._too_large(len(body))
            if len(body) > _ENVELOPE_BYTES_MAX:
                return self._decode_json(body)
            last = self._last
            if last is not None and body.startswith(last[0]) and body.endswith(last[1]):
                call = _read_numbers(body, last)
                if call is not None:
                    return call
            return self._decode_new(body)
        parts = self._last_parts
        if parts is None or len(parts[0]) != header_bytes or len(body) != parts[1] or body[:header_bytes] != parts[0]:
            head = bytes(body[:header_bytes]) if 0 < header_bytes <= _PREFIX_BYTES_MAX else b""
            parts = self._binary.get(head)
            if parts is None or len(body) != parts[1] or len(head) != header_bytes:
                return self._decode_parts(memoryview(body), header_bytes)
            self._last_parts = parts
        # Copying a small piece is faster than making a view of it, and joining the copy is faster, too.
        view = body if len(body) < VIEW_BYTES_MIN else memoryview(body)
        inputs: list[InputTensor] = []
        for shape, at, end in parts[2]:
            inputs.append(_new(InputTensor, (shape, view[at:end], end - at)))
        return _new(InferCall, (inputs, parts[3]))

    def _decode_new(self, body: bytes) -> InferCall:
        """Return the request in a JSON body whose envelope differs from the previous request's."""
        # The numbers are between the last "[" and the "]" after it; the rest is the envelope.
        start = body.rfind(b"[")
        if start < _PREFIX_BYTES_MAX:
            envelope = self._json.get(body[: start + 1] + body[body.find(b"]", start) :])
            if envelope is not None:
                self._last = envelope
                call = _read_numbers(body, envelope)
                if call is not None:
                    return call
        return self._decode_json(body)

    def _decode_parts(self, body: memoryview, header_bytes: int) -> InferCall:
        """Return the request in a JSON part of `header_bytes` and binary tensors. Without a JSON part it is raw."""
        if header_bytes == 0:
            return self._decode_raw(body)
        if not 0 < header_bytes <= len(body):
            raise invalid(f"inference header size should be in range (0, {len(body)}), got: {header_bytes}")
        if header_bytes > self._json_bytes_max:
            raise self._too_large(header_bytes)
        text = bytes(body[:header_bytes])
        document = parse_json(text, self._plans.json_limits, number_lists=True)
        try:
            call = self._read(self._plans, document, text, body[header_bytes:])
        except Failure as failure:
            return self._read_columns(failure, document, body[header_bytes:])
        if not call.options.id and call.options.output_options is None and header_bytes <= _PREFIX_BYTES_MAX:
            envelope = _binary_envelope(call, text, document["inputs"], self._plans.by_name)
            if envelope is not None:
                _remember(self._binary, text, envelope)
        return call

    def _decode_json(self, body: bytes) -> InferCall:
        """Return the request in a body that is all JSON; an empty body is a raw request."""
        if not body:
            return self._decode_raw(memoryview(body))
        document = parse_json(body, self._plans.json_limits, number_lists=True)
        try:
            call = self._read(self._plans, document, body, memoryview(b""))
        except Failure as failure:
            return self._read_columns(failure, document, memoryview(b""))
        first = self._first if len(self._plans) == 1 and call.inputs[0] is not ABSENT else None
        if len(body) > _ENVELOPE_BYTES_MAX:
            first = None
        if first is not None and not call.options.id and call.options.output_options is None:
            envelope = _json_envelope(call, body, first)
            if envelope is not None:
                _remember(self._json, *envelope)
        return call

    def _read_columns(self, failure: Failure, document: dict[str, Any], tail: memoryview) -> InferCall:
        """Return a request, which the version's inputs refused with `failure`, that gives columns by name."""
        items = document.get("inputs")
        if type(items) is not list or not all(type(item) is dict for item in items):
            raise failure
        columns = columns_given(self._plans, failure, [item.get("name") for item in items])
        given = [(item["name"], item.get("datatype"), item.get("shape")) for item in items]
        sent = plans_of_columns(self._plans, columns, given)
        call = self._read(sent, document, b"", tail)  # a search of the whole text for each column would be quadratic
        inputs, rows = from_columns(columns, sent, call.inputs)
        return InferCall(inputs, call.options._replace(rows=rows))

    def _read(self, plans: InputPlans, document: dict[str, Any], text: bytes, tail: memoryview) -> InferCall:
        tensors: list[InputTensor | None] = [None] * len(plans)
        rows = -1
        at = shared_bytes = 0
        for item in _items(document):
            plan = plans.named(_name(item))
            if tensors[plan.index] is not None:
                raise plans.duplicate(plan)
            extent = plan.extent(item)
            if rows != extent.rows:
                if rows >= 0:
                    raise plans.rows_differ(plan)
                rows = extent.rows
            parameters = item.get("parameters")
            if parameters is None and "data" in item:
                data = raw_from_json(plan, extent, item["data"], text)
                tensors[plan.index] = _new(InputTensor, (extent.shape, data, len(data)))
            else:
                parameters = expect_parameters(parameters, plan.where)
                tensor = self._tensor(plan, extent, item, parameters, text, tail[at:])
                if "binary_data_size" in parameters:
                    at += tensor.size_bytes
                elif "data" not in item:
                    shared_bytes += tensor.size_bytes
                tensors[plan.index] = opened(plan, tensor, parameters.get("content_type"))
        if at != len(tail):
            raise invalid(f"unexpected additional input data for model '{self._model}'")
        inputs = plans.complete(tensors)
        rows = rows if rows >= 0 else 1
        if len(document) == 1:
            return InferCall(inputs, Options(rows))
        options = read_options(document, rows, self._outputs, self._model, self._extensions)
        return InferCall(inputs, options._replace(shared_memory_bytes=shared_bytes) if shared_bytes else options)

    def _tensor(
        self,
        plan: InputPlan,
        extent: Extent,
        item: dict[str, Any],
        parameters: dict[str, Any],
        text: bytes,
        tail: memoryview,
    ) -> InputTensor:
        """Return an input with parameters. Its data is in the JSON, the next bytes of `tail`, or shared memory."""
        binary = "binary_data_size" in parameters
        span = read_span(parameters, plan.where)
        sources = ("data" in item) + binary + (span is not None)
        if sources != 1:
            but = "no field was" if sources == 0 else "multiple fields were"
            raise invalid(f"Input must set only one of the following fields: {_FIELDS}. But {but} set{plan.where}")
        if span is not None:
            return self._extensions.read(plan, extent, span)
        if not binary:
            data = raw_from_json(plan, extent, item["data"], text)
            return InputTensor(extent.shape, data, len(data))
        size_bytes = expect_unsigned(parameters["binary_data_size"], "binary_data_size", plan.where)
        if size_bytes > len(tail):
            raise invalid(
                f"unexpected size for input '{plan.name}', expecting {size_bytes - len(tail)} additional bytes "
                f"for model '{self._model}'"
            )
        return raw_tensor(plan, extent, tail[:size_bytes])

    def _decode_raw(self, body: memoryview) -> InferCall:
        """Return a raw request: the whole body is the only input's tensor, and all outputs are binary."""
        if isinstance(self._plans, PreparedPlans):
            return InferCall(self._plans.one(bytes(body)).tensors, Options(1, binary_default=True))
        plan = self._first
        if plan is None or len(self._plans) != 1:
            raise invalid(
                f"Raw request must only have 1 input (found 1) to be deduced but got {len(self._plans)} inputs in "
                f"'{self._model}' model configuration"
            )
        extent = plan.deduce(len(body))
        data = memoryview(encode_elements([bytes(body)])) if plan.datatype == BYTES else body
        return InferCall([raw_tensor(plan, extent, data)], Options(extent.rows, binary_default=True))

    def _too_large(self, size_bytes: int) -> Failure:
        return Failure(
            Code.TOO_LARGE,
            f"the JSON part of the request has {size_bytes} bytes, which exceeds the maximum allowed input size of "
            f"{self._json_bytes_max} bytes: send large tensors in binary form",
        )


def _items(document: dict[str, Any]) -> list[Any]:
    """Return the elements of `inputs`. Raises Failure(INVALID)."""
    items = document.get("inputs")
    if type(items) is not list:
        if "inputs" not in document:
            raise_missing("inputs")
        raise_mistyped("inputs", "array")
    return items


def _name(item: object) -> str:
    """Return the name of an element of `inputs`. Raises Failure(INVALID)."""
    if type(item) is not dict:
        raise_mistyped("inputs", "object")
    name = item.get("name")
    if name is None:
        raise_missing("name", " in 'inputs'")
    if type(name) is not str:
        raise_mistyped("name", "string", " in 'inputs'")
    return name


async def decode_prepared(
    plans: InputPlans, decoder: V2Decoder, body: bytes | memoryview, header_bytes: int | None
) -> InferCall:
    """Return the request in a body, as `decoder` reads it, with tensors in place of texts and encoded files.

    `plans`: those that the decoder was made with. Raises Failure.
    """
    try:
        return await run_in_thread_if_large(len(body), decoder.decode, body, header_bytes)
    except Failure as failure:
        prepared = prepared_for(plans, failure, body if header_bytes == 0 else b"")
        if decoder.prepared is None or prepared is None:
            raise
    call = await run_in_thread_if_large(len(body), decoder.prepared.decode, body, header_bytes)
    return call._replace(inputs=(await prepared.prepare(call.inputs)).tensors)


def _read_numbers(body: bytes, envelope: JsonEnvelope) -> InferCall | None:
    """Return the request in a body with a cached envelope; None unless its data is the right count of numbers."""
    prefix, suffix, pack, shape, size_bytes, options = envelope
    numbers = body[len(prefix) - 1 : len(body) - len(suffix) + 1]
    try:
        values = _loads(numbers)
        data = pack(*values)
    except _NOT_NUMBERS:
        return None
    # true, false and numbers with exponents contain an e.
    if _E in numbers and bool in set(map(type, values)):
        return None
    return _new(InferCall, ([_new(InputTensor, (shape, data, size_bytes))], options))


def _remember(envelopes: dict[bytes, _Envelope], key: bytes, envelope: _Envelope) -> None:
    """Cache `envelope`. A full cache is emptied: envelopes in use return with their next request."""
    if len(envelopes) >= _ENVELOPES_MAX:
        envelopes.clear()
    envelopes[key] = envelope


def _json_envelope(call: InferCall, body: bytes, plan: InputPlan) -> tuple[bytes, JsonEnvelope] | None:
    """Return prefix + suffix of `body` as its key, and its envelope, if its data is one flat list of numbers."""
    start = body.rfind(b"[")
    end = body.find(b"]", start)
    if plan.code is None or not 0 < start < _PREFIX_BYTES_MAX or len(body) - end > _SUFFIX_BYTES_MAX:
        return None
    prefix, suffix = body[: start + 1], body[end:]
    try:
        data: Any = orjson.loads(prefix + _PROBE + suffix)["inputs"][0].get("data")
    except orjson.JSONDecodeError:
        return None
    while type(data) is list and len(data) == 1:
        data = data[0]
    if data != "~":
        return None
    tensor = call.inputs[0]
    pack = struct.Struct(f"{tensor.size_bytes // plan.item_bytes}{plan.code}").pack
    return prefix + suffix, (prefix, suffix, pack, tensor.shape, tensor.size_bytes, call.options)


def _binary_envelope(
    call: InferCall, text: bytes, items: list[dict[str, Any]], plans: dict[str, InputPlan]
) -> BinaryEnvelope | None:
    """Return the envelope of a body with all its inputs in binary form: its JSON part `text`, with `inputs` in it."""
    tensors: dict[int, tuple[tuple[int, ...], int, int]] = {}
    at = len(text)
    for item in items:
        plan = plans.get(item["name"])
        if plan is None or "binary_data_size" not in (item.get("parameters") or {}) or not plan.opaque:
            return None
        tensor = call.inputs[plan.index]
        tensors[plan.index] = (tensor.shape, at, at + tensor.size_bytes)
        at += tensor.size_bytes
    absent = (ABSENT.shape, 0, 0)
    return text, at, [tensors.get(index, absent) for index in range(len(plans))], call.options
