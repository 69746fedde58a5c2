"""One input: what a version takes, prepared for decoding, with a cache of shapes, and a tensor of a request. Pure."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from millstream.gateway.tensors.json_document import excerpt, raise_missing, raise_mistyped
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import BINARY_ONLY, BYTES, DATATYPES, ELEMENTS_MAX, ITEM_BYTES, NUMPY
from millstream.services.model.signature import TensorSpec

Buffer = bytes | bytearray | memoryview | np.ndarray[Any, Any]


class InputTensor(NamedTuple):
    """One input of a request in raw form (millstream.services.model.datatypes). The signature has its datatype."""

    shape: tuple[int, ...]
    data: Buffer  # C-contiguous
    size_bytes: int  # size of `data` in raw form


#: an optional input that a request lacks; no tensor has this shape
ABSENT = InputTensor((-1, -1), b"", 0)
#: datatype -> struct code in native byte order (little-endian wherever ONNX Runtime runs). The native codes are the
#: fast ones, and the native "f" turns a number out of range into infinity, as numpy's cast does
_CODES = {name: dtype.char for name, dtype in NUMPY.items() if name not in {"BOOL", *BINARY_ONLY}}
_JSON_TYPES = {"BOOL": "boolean", "BYTES": "string", "FP32": "number", "FP64": "number"}

_EXTENTS_MAX = 256  # shapes cached for each input; then the cache is emptied


class Extent:
    """A shape that fits the signature, with its rows, elements and bytes in raw form (-1 for BYTES)."""

    __slots__ = ("_pack", "elements", "rows", "shape", "size_bytes")

    def __init__(self, shape: tuple[int, ...], rows: int, elements: int, size_bytes: int) -> None:
        self.shape = shape
        self.rows = rows
        self.elements = elements
        self.size_bytes = size_bytes
        self._pack: Callable[..., bytes] | None = None

    def packer(self, code: str) -> Callable[..., bytes]:
        """Return the function that packs `elements` numbers. Get it once they exist: a shape may claim any number."""
        if self._pack is None:
            self._pack = struct.Struct(f"{self.elements}{code}").pack
        return self._pack


class OtherDatatype(Failure):
    """INVALID: a request gives the input `name` with a datatype that the model does not take."""

    def __init__(self, name: str, datatype: str, message: str) -> None:
        super().__init__(Code.INVALID, message)
        self.name = name
        self.datatype = datatype


class InputPlan:
    """One input of a version: its spec in the forms that decoding needs. `rows_max`: of one request."""

    def __init__(self, model: str, index: int, spec: TensorSpec, batching: bool, rows_max: int) -> None:
        self.model = model
        self.index = index
        self.name = spec.name
        self.datatype = spec.datatype
        self.optional = spec.optional
        self.document = spec.document
        self.shape = spec.shape
        self.where = f" for input '{excerpt(spec.name)}'"
        self.code = _CODES.get(spec.datatype)  # None: `struct` has no code for the datatype
        self.item_bytes = ITEM_BYTES.get(spec.datatype, 0)
        #: any byte string of the right length is a valid tensor
        self.opaque = spec.datatype not in {"BOOL", BYTES}
        #: whether each row has one element
        self.is_column = bool(spec.shape) and set(spec.shape[1:]) <= {1}
        unsigned = "unsigned-integer" if spec.datatype.startswith("U") else "signed-integer"
        self.json_type = _JSON_TYPES.get(spec.datatype, unsigned)
        self._batching = batching
        self._rows_max = rows_max
        self._extents: dict[tuple[int, ...], Extent] = {}

    def extent(self, item: dict[str, Any]) -> Extent:
        """Return the checked shape of `item`, an element of `inputs` in JSON. Raises Failure(INVALID)."""
        datatype = item.get("datatype")
        if datatype != self.datatype:
            self._refuse_datatype(datatype)
        shape = item.get("shape")
        if type(shape) is not list:
            if "shape" not in item:
                raise_missing("shape", self.where)
            raise_mistyped("shape", "array", self.where)
        for dim in shape:
            if type(dim) is not int or dim < 0:
                raise_mistyped("shape", "unsigned-integer", self.where)
        key = tuple(shape)
        return self._extents.get(key) or self._extent_of(key)

    def fit(self, datatype: str, shape: tuple[int, ...]) -> Extent:
        """Return the checked shape of an input that is not JSON. Raises Failure(INVALID)."""
        if datatype != self.datatype:
            self._refuse_datatype(datatype)
        extent = self._extents.get(shape)
        if extent is None:
            if min(shape, default=0) < 0:
                raise_mistyped("shape", "unsigned-integer", self.where)
            extent = self._extent_of(shape)
        return extent

    def _extent_of(self, shape: tuple[int, ...]) -> Extent:
        elements = bounded = 1
        for dim in shape:
            elements *= dim
            bounded *= dim or 1  # a dimension of 0 must not hide the others: numpy limits their product, too
            if bounded > ELEMENTS_MAX:
                raise invalid(
                    f"the shape{self.where} causes total element count to exceed maximum size of {ELEMENTS_MAX}"
                )
        if bounded * (self.item_bytes or 4) > ELEMENTS_MAX:
            raise invalid(f"byte size overflow{self.where}")
        if len(shape) != len(self.shape) or any(
            want not in {-1, got} for want, got in zip(self.shape, shape, strict=True)
        ):
            raise invalid(
                f"unexpected shape for input '{self.name}' for model '{self.model}'. "
                f"Expected {_dims(self.shape)}, got {excerpt(_dims(shape))}."
            )
        if self._batching and shape[0] > self._rows_max:
            raise invalid(f"inference request batch-size must be <= {self._rows_max} for '{self.model}'")
        size_bytes = elements * self.item_bytes if self.item_bytes else -1
        extent = Extent(shape, shape[0] if self._batching else 1, elements, size_bytes)
        if len(self._extents) >= _EXTENTS_MAX:
            self._extents.clear()
        self._extents[shape] = extent
        return extent

    def deduce(self, body_bytes: int) -> Extent:
        """Return the extent of a raw request's tensor: one row; a variable dimension follows from the body's size."""
        dims = self.shape[1:] if self._batching else self.shape
        if self.datatype == BYTES:
            if dims != (1,):
                raise invalid(
                    f"For BYTE datatype raw input '{self.name}', the model must have input shape [1]; "
                    f"here it is {_dims(dims)}"
                )
        elif dims.count(-1) > 1:
            raise invalid(
                f"The shape of the raw input '{self.name}' can not be deduced because there are more than one "
                "variable-sized dimension"
            )
        else:
            unit = self.item_bytes
            for dim in dims:
                unit *= dim if dim >= 0 else 1
            variable = body_bytes // unit if unit else 0
            dims = tuple(variable if dim == -1 else dim for dim in dims)
        return self._extent_of((1, *dims) if self._batching else dims)

    def size_mismatch(self, extent: Extent, size_bytes: int) -> Failure:
        return invalid(
            f"input byte size mismatch for input '{self.name}' for model '{self.model}'. "
            f"Expected {extent.size_bytes}, got {size_bytes}"
        )

    def _refuse_datatype(self, datatype: object) -> None:
        if datatype is None:
            raise_missing("datatype", self.where)
        if type(datatype) is not str:
            raise_mistyped("datatype", "string", self.where)
        if datatype not in DATATYPES:
            raise invalid(f"invalid datatype for input {self.name}: '{excerpt(datatype)}'")
        raise OtherDatatype(
            self.name,
            datatype,
            f"inference input '{self.name}' data-type is '{datatype}', "
            f"but model '{self.model}' expects '{self.datatype}'",
        )


def _dims(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
