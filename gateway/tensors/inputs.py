"""One input of a request in raw form. Pure data."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Buffer = bytes | bytearray | memoryview | np.ndarray[Any, Any]


class InputTensor(NamedTuple):
    """One input of a request in raw form (millstream.services.model.datatypes). The signature has its datatype."""

    shape: tuple[int, ...]
    data: Buffer  # C-contiguous
    size_bytes: int  # size of `data` in raw form


#: an optional input that a request lacks; no tensor has this shape
ABSENT = InputTensor((-1, -1), b"", 0)
