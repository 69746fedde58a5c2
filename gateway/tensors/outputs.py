"""The outputs of a batch, split into one reply for each request; an output as raw bytes, numbers or nested JSON.

The arrays of a reply are views of the batch's memory. They are valid only until the reply has been handed on.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from math import isnan, prod
from typing import Any, NamedTuple

import numpy as np
import orjson

from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import BYTES, NUMPY, encode_elements
from millstream.services.model.signature import Signature, TensorSpec

#: an output with such a name is base64 in protocols of JSON (TensorFlow Serving's rule)
BYTES_SUFFIX = "_bytes"
#: makes a NamedTuple in a third of the time that its own constructor takes
_new = tuple.__new__


class OutputTensor(NamedTuple):
    """One output of one request."""

    datatype: str
    shape: tuple[int, ...]
    array: np.ndarray[Any, Any] | list[bytes]  # in `shape`, BF16 as uint16; for BYTES a flat list


Reply = Sequence[OutputTensor]
"""All outputs of the version, in the signature's order."""


def no_rows(signature: Signature) -> list[OutputTensor]:
    """Return the outputs of a request for 0 rows, in the signature's order. Variable dimensions are 0, too."""
    return [
        OutputTensor(spec.datatype, shape, [] if spec.datatype == BYTES else np.empty(shape, NUMPY[spec.datatype]))
        for spec in signature.outputs
        for shape in [(0, *[max(dim, 0) for dim in spec.shape[1:]])]
    ]


def answered(signature: Signature, outputs: Reply) -> list[tuple[TensorSpec, OutputTensor]]:
    """Return the outputs of a request that names none of them, with their specifications."""
    return [pair for pair in zip(signature.outputs, outputs, strict=True) if not pair[0].on_request]


def own_copies(reply: Reply) -> list[OutputTensor]:
    """Return copies of the outputs that stay valid after the reply has been handed on."""
    return [
        output if isinstance(output.array, list) else output._replace(array=np.array(output.array)) for output in reply
    ]


def size_of(outputs: Reply) -> int:
    """Return the approximate size of `outputs` in bytes."""
    return sum([_elements_bytes(array) if isinstance(array, list) else array.nbytes for _, _, array in outputs])


def _elements_bytes(elements: list[bytes]) -> int:
    return sum(map(len, elements)) + 8 * len(elements)


class Column(NamedTuple):
    """One output of all requests of a batch."""

    datatype: str
    inner: tuple[int, ...]  # the shape without the rows; the whole shape when the version does not batch
    #: (rows of all requests, *inner), C-contiguous; for BYTES the elements of each request
    array: np.ndarray[Any, Any] | list[list[bytes]]


class Outputs(NamedTuple):
    """All outputs of a batch."""

    columns: Sequence[Column]  # in the signature's order
    batching: bool  # dimension 0 is rows; otherwise the batch is one request

    @property
    def size_bytes(self) -> int:
        """The approximate size of the outputs of all requests."""
        return sum(
            [
                sum(map(_elements_bytes, column.array)) if isinstance(column.array, list) else column.array.nbytes
                for column in self.columns
            ]
        )

    def replies(self, rows: Sequence[int]) -> list[list[OutputTensor]]:
        """Split the outputs into one reply for each request. `rows`: how many each request has."""
        shares = [self._shares(column, rows) for column in self.columns]
        return [list(reply) for reply in zip(*shares, strict=True)]

    def _shares(self, column: Column, rows: Sequence[int]) -> list[OutputTensor]:
        datatype, inner, array = column
        if isinstance(array, list):
            shapes = [(count, *inner) if self.batching else inner for count in rows]
            return [OutputTensor(datatype, shape, elements) for shape, elements in zip(shapes, array, strict=True)]
        if not self.batching:
            return [OutputTensor(datatype, inner, array)]
        shares: list[OutputTensor] = []
        at = 0
        for count in rows:
            end = at + count
            shares.append(_new(OutputTensor, (datatype, (count, *inner), array[at:end])))
            at = end
        return shares


NO_OUTPUTS = Outputs((), batching=False)

#: From this size on, a view of bytes of a request or reply is faster than a copy.
VIEW_BYTES_MIN = 16384


def raw_bytes(output: OutputTensor) -> bytes | memoryview:
    """Return the output in raw form (millstream.services.model.datatypes); of a large one, a view."""
    array = output.array
    if isinstance(array, list):
        return encode_elements(array)
    if array.nbytes >= VIEW_BYTES_MIN and array.flags.c_contiguous:
        return array.reshape(-1).view(np.uint8).data
    return array.tobytes()


def as_numbers(output: OutputTensor) -> np.ndarray[Any, Any]:
    """Return the numbers of an output, which is not BYTES, in its shape. BF16, which numpy lacks, becomes FP32."""
    array = output.array
    assert not isinstance(array, list)
    if output.datatype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array).reshape(output.shape)


PIECE_ELEMENTS = 1 << 15  # numbers written by one call: 1 to 2 ms

_dumps = orjson.dumps
_NUMPY = orjson.OPT_SERIALIZE_NUMPY


def dump_numbers(array: np.ndarray[Any, Any]) -> bytes:
    """Return a C-contiguous array as JSON, nested as it is, with NaN, Infinity and -Infinity where orjson writes null.

    Large arrays are written in pieces, because orjson lets no other thread run while it writes.
    """
    if array.size <= PIECE_ELEMENTS:
        return _piece(array)
    if len(array) == 1:
        return b"[%b]" % dump_numbers(array[0])
    inner = array.size // len(array)
    step = max(1, PIECE_ELEMENTS // inner)
    write = _piece if inner <= PIECE_ELEMENTS else dump_numbers
    return b"[%b]" % b",".join([write(array[at : at + step])[1:-1] for at in range(0, len(array), step)])


def _piece(array: np.ndarray[Any, Any]) -> bytes:
    text = _dumps(array, None, _NUMPY)
    if b"null" not in text:
        return text
    flat = array.ravel()
    not_finite = flat[~np.isfinite(flat)]
    tokens = [b"NaN" if isnan(value) else b"Infinity" if value > 0 else b"-Infinity" for value in not_finite.tolist()]
    pieces = text.split(b"null")
    woven = [piece for pair in zip(pieces, tokens, strict=False) for piece in pair]
    return b"".join((*woven, pieces[-1]))


def text_of(output: OutputTensor, *, b64: bool = False) -> bytes:
    """Return the output as JSON, nested as its shape is. NaN and infinities are written as in Python and TensorFlow.

    BYTES are strings, or with `b64` objects `{"b64": "…"}`. Raises Failure(INVALID) for strings that are not UTF-8.
    """
    array = output.array
    if isinstance(array, list):
        return orjson.dumps(nested(_texts(array, b64=b64), output.shape))
    values = as_numbers(output)
    return dump_numbers(values) if values.ndim else dump_numbers(values.reshape(1))[1:-1]


def json_of(spec: TensorSpec, output: OutputTensor) -> bytes:
    """Return the output as JSON, as `text_of` does: documents as they are, and base64 if its name ends in `_bytes`.

    Raises Failure(INVALID) as `text_of` does, and Failure(MODEL) for a document that is no JSON.
    """
    if not (spec.document and isinstance(output.array, list)):
        return text_of(output, b64=spec.name.endswith(BYTES_SUFFIX))
    try:
        return orjson.dumps(nested([orjson.loads(one) for one in output.array], output.shape))
    except orjson.JSONDecodeError as error:
        raise Failure(Code.MODEL, f"output '{spec.name}' is no document of JSON: {error}") from None


def rows_of(output: OutputTensor) -> list[OutputTensor]:
    """Return one output for each index of dimension 0, without that dimension."""
    count, *rest = output.shape
    array = output.array
    if isinstance(array, list):
        size = prod(rest)
        parts: list[Any] = [array[at * size : (at + 1) * size] for at in range(count)]
    else:
        parts = list(array.reshape(output.shape))
    return [OutputTensor(output.datatype, tuple(rest), part) for part in parts]


def nested(flat: list[Any], shape: Sequence[int]) -> Any:
    """Return `flat` as lists of lists; with a shape of no dimensions, the one element."""
    if not shape:
        return flat[0]
    if 0 in shape:
        return np.empty(shape).tolist()
    for size in reversed(shape[1:]):
        flat = [flat[at : at + size] for at in range(0, len(flat), size)]
    return flat


def _texts(elements: list[bytes], *, b64: bool) -> list[Any]:
    if b64:
        return [{"b64": base64.b64encode(element).decode()} for element in elements]
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        raise invalid(
            "an output holds bytes that are not UTF-8 and have no JSON form: name the output '…_bytes', or use v2 with "
            "binary data"
        ) from None
