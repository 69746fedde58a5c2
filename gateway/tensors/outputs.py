"""The outputs of a batch, split into one reply for each request.

The arrays of a reply are views of the batch's memory. They are valid only until the reply has been handed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from millstream.gateway.tensors.elements import raw_from_strings
from millstream.services.model.datatypes import BYTES, NUMPY
from millstream.services.model.signature import Signature, TensorSpec

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


#: From this size on, a view of bytes of a request or reply is faster than a copy.
VIEW_BYTES_MIN = 16384


def raw_bytes(output: OutputTensor) -> bytes | memoryview:
    """Return the output in raw form (millstream.services.model.datatypes); of a large one, a view."""
    array = output.array
    if isinstance(array, list):
        return raw_from_strings(array)
    if array.nbytes >= VIEW_BYTES_MIN and array.flags.c_contiguous:
        return array.reshape(-1).view(np.uint8).data
    return array.tobytes()
