"""One input of a request in raw form. Pure data."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Buffer = bytes | bytearray | memoryview | np.ndarray[Any, Any]


class InputTensor(NamedTuple):
    """One input of a request in raw form (millstream.services.model.datatypes); its datatype is that of the signature.

    `data`: C-contiguous; an ndarray or any bytes-like object. `size_bytes` is its length in raw form.
    """

    shape: tuple[int, ...]
    data: Buffer
    size_bytes: int


#: no tensor has this shape: an optional input that a request did not bring
ABSENT = InputTensor((-1, -1), b"", 0)
