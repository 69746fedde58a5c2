"""The outputs of a batch, and how they are shared out among its requests. Views: valid only while they are handed on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from millstream.gateway.tensors.elements import raw_from_strings
from millstream.services.model.datatypes import BYTES, NUMPY
from millstream.services.model.signature import Signature

#: makes a NamedTuple without its keyword-friendly constructor, in a third of the time
_new = tuple.__new__


class OutputTensor(NamedTuple):
    """One output of one request.

    `array`: numpy array of `shape` for fixed-size datatypes (BF16 as uint16); for BYTES a flat list of `bytes`.
    """

    datatype: str
    shape: tuple[int, ...]
    array: np.ndarray[Any, Any] | list[bytes]


Reply = Sequence[OutputTensor]
"""All outputs of the version, in the signature's order."""


def no_rows(signature: Signature) -> list[OutputTensor]:
    """The outputs of a request for no rows, in the signature's order: variable dimensions are 0, too."""
    return [
        OutputTensor(spec.datatype, shape, [] if spec.datatype == BYTES else np.empty(shape, NUMPY[spec.datatype]))
        for spec in signature.outputs
        for shape in [(0, *[max(dim, 0) for dim in spec.shape[1:]])]
    ]


def own_copies(reply: Reply) -> list[OutputTensor]:
    """Return the same outputs as copies that may be kept: arrays of a reply are valid only while it is handed on."""
    return [
        output if isinstance(output.array, list) else output._replace(array=np.array(output.array)) for output in reply
    ]


def size_of(outputs: Reply) -> int:
    """Bytes of outputs, about."""
    return sum([_elements_bytes(array) if isinstance(array, list) else array.nbytes for _, _, array in outputs])


def _elements_bytes(elements: list[bytes]) -> int:
    return sum(map(len, elements)) + 8 * len(elements)


class Column(NamedTuple):
    """One output of all requests of a batch. `inner`: its shape without the rows (whole when the version does not batch).

    `array`: (rows of all requests, *inner), C-contiguous; for BYTES the elements of each request.
    """

    datatype: str
    inner: tuple[int, ...]
    array: np.ndarray[Any, Any] | list[list[bytes]]


class Outputs(NamedTuple):
    """`columns`: in the signature's order. `batching`: whether dimension 0 is rows; if not there is one request."""

    columns: Sequence[Column]
    batching: bool

    @property
    def size_bytes(self) -> int:
        """Of all requests, about."""
        return sum(
            [
                sum(map(_elements_bytes, column.array)) if isinstance(column.array, list) else column.array.nbytes
                for column in self.columns
            ]
        )

    def replies(self, rows: Sequence[int]) -> list[list[OutputTensor]]:
        """Each request's own. `rows`: of each of them."""
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


# from here on, joining a view is faster than copying it first
VIEW_BYTES_MIN = 16384


def raw_bytes(output: OutputTensor) -> bytes | memoryview:
    """The output in raw form (millstream.services.model.datatypes); a large one is a view."""
    array = output.array
    if isinstance(array, list):
        return raw_from_strings(array)
    if array.nbytes >= VIEW_BYTES_MIN and array.flags.c_contiguous:
        return array.reshape(-1).view(np.uint8).data
    return array.tobytes()
