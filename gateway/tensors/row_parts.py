"""Cuts the rows of a request's inputs into parts, and joins the outputs of the parts. Pure.

inputs ─> InputRows.take ─> views of the next rows          outputs of each part ─> JoinedOutputs ─> one reply
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from millstream.gateway.tensors.inputs import ABSENT, InputTensor
from millstream.gateway.tensors.outputs import OutputTensor, Reply, size_of
from millstream.services.model.datatypes import BYTES, end_of_elements
from millstream.services.model.signature import TensorSpec


class InputRows:
    """The inputs of a request of at least one row, from which rows are taken in order. `left`: those not taken yet.

    `inputs`: with dimension 0 as the rows, or ABSENT.
    """

    __slots__ = ("_inputs", "_offsets", "_row_bytes", "_views", "left")

    def __init__(self, specs: Sequence[TensorSpec], inputs: Sequence[InputTensor], rows: int) -> None:
        self.left = rows
        self._inputs = inputs
        self._views = [_flat(tensor.data) for tensor in inputs]
        self._offsets = [0] * len(inputs)
        #: bytes of a row; None: elements have lengths of their own
        self._row_bytes = [
            None if spec.datatype == BYTES else tensor.size_bytes // rows
            for spec, tensor in zip(specs, inputs, strict=True)
        ]

    def take(self, rows: int) -> list[InputTensor]:
        """Return the next rows as views of the inputs. `rows`: at most those that are left."""
        self.left -= rows
        return [
            tensor if tensor.shape == ABSENT.shape else self._take(index, (rows, *tensor.shape[1:]))
            for index, tensor in enumerate(self._inputs)
        ]

    def _take(self, index: int, shape: tuple[int, ...]) -> InputTensor:
        view, start, row_bytes = self._views[index], self._offsets[index], self._row_bytes[index]
        if row_bytes is None:
            end = end_of_elements(view, start, math.prod(shape))
        else:
            end = start + shape[0] * row_bytes
        self._offsets[index] = end
        return InputTensor(shape, view[start:end], end - start)


def _flat(data: Any) -> memoryview:
    """Return a view of the bytes of a tensor."""
    if isinstance(data, np.ndarray):
        data = data.reshape(-1).view(np.uint8).data
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class JoinedOutputs:
    """The outputs of the parts of a request of `rows` rows, which come in any order."""

    __slots__ = ("_columns", "_rows", "_texts")

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._columns: list[OutputTensor] = []  # with room for all rows; of BYTES without elements
        self._texts: dict[int, list[list[bytes]]] = {}  # first row of a part -> its elements of each output of BYTES

    def more_bytes(self, reply: Reply) -> int:
        """Return how many bytes `add` takes for the outputs of a part: at the first one, those of all numbers."""
        texts = size_of([output for output in reply if isinstance(output.array, list)])
        if self._columns:
            return texts
        arrays = [output.array for output in reply if not isinstance(output.array, list)]
        return texts + sum([array.nbytes // len(array) * self._rows for array in arrays])

    def add(self, first_row: int, reply: Reply) -> int | None:
        """Copy the outputs of a part to its rows.

        Returns the index of an output whose shape without the rows differs from that of another part; None: there is
        none.
        """
        if not self._columns:
            self._columns = [_column(self._rows, output) for output in reply]
        texts: list[list[bytes]] = []
        for index, (column, output) in enumerate(zip(self._columns, reply, strict=True)):
            if output.shape[1:] != column.shape[1:]:
                return index
            if isinstance(output.array, list):
                texts.append(output.array)
            else:
                column.array[first_row : first_row + output.shape[0]] = output.array
        if texts:
            self._texts[first_row] = texts
        return None

    def reply(self) -> list[OutputTensor]:
        """Return the outputs of all parts, in the order of their rows."""
        parts = [self._texts[first_row] for first_row in sorted(self._texts)]
        columns = iter(zip(*parts, strict=True))
        return [
            column._replace(array=list(chain.from_iterable(next(columns)))) if column.datatype == BYTES else column
            for column in self._columns
        ]


def _column(rows: int, output: OutputTensor) -> OutputTensor:
    """Return an output with room for `rows` rows like those of `output`; of BYTES without elements."""
    shape = (rows, *output.shape[1:])
    array = output.array
    return OutputTensor(output.datatype, shape, [] if isinstance(array, list) else np.empty(shape, array.dtype))
