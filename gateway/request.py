"""A request on its way through the gateway, and the reply to it. Pure data.

An adapter builds a Request, the dispatcher answers it exactly once by calling `on_reply` with a Reply or a Failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from services.errors import Failure

Buffer = bytes | bytearray | memoryview | np.ndarray[Any, Any]


class InputTensor(NamedTuple):
    """One input of a request in raw form (services.datatypes); its datatype is that of the signature.

    `data`: C-contiguous; an ndarray or any bytes-like object. `size_bytes` is its length in raw form.
    """

    shape: tuple[int, ...]
    data: Buffer
    size_bytes: int


class OutputTensor(NamedTuple):
    """One output of a reply. Valid only inside the `on_reply` call: it may be a view on shared memory.

    `array`: numpy array of `shape` for fixed-size datatypes (BF16 as uint16); for BYTES a flat list of `bytes`.
    """

    datatype: str
    shape: tuple[int, ...]
    array: np.ndarray[Any, Any] | list[bytes]
    finite: bool  # False: a float output may hold NaN or infinities


Reply = Sequence[OutputTensor]
"""All outputs of the version, in the signature's order."""


class Request:
    """One caller's unit of work. Times are seconds on the monotonic clock of this process."""

    __slots__ = (
        "arrival",
        "counted",
        "deadline",
        "done",
        "inputs",
        "on_reply",
        "permit_bytes",
        "priority",
        "rows",
        "taken",
    )

    def __init__(
        self,
        inputs: Sequence[InputTensor],
        rows: int,
        priority: int,
        arrival: float,
        deadline: float,
        on_reply: Callable[[Reply | Failure], None],
    ) -> None:
        self.inputs = inputs  # in the signature's order, one for every input
        self.rows = rows  # dimension 0 of a batching version; 1 otherwise
        self.priority = priority  # 0: default; 1: highest; larger numbers come later
        self.arrival = arrival
        self.deadline = deadline
        self.on_reply = on_reply
        self.permit_bytes = 0
        self.done = False  # answered or cancelled
        self.taken = False  # left the lane in a batch
        self.counted = True  # False: a canary, which no metric of the users' requests shows
