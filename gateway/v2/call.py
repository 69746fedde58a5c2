"""A decoded inference request of v2 REST. Pure data."""

from __future__ import annotations

from typing import NamedTuple

from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.output_options import OutputOption


class Options(NamedTuple):
    """The parts of a request besides its inputs' data. Requests with the same envelope share one object."""

    rows: int  # dimension 0 when the version batches; 1 otherwise
    id: str = ""  # "": the request has none
    outputs: list[tuple[int, bool]] | None = None  # (index in the signature, binary) as requested; None: all
    binary_default: bool = False  # the form of the outputs when `outputs` is None
    timeout_s: float | None = None
    priority: int = 0  # 0: default; 1: highest; larger numbers come later
    output_options: dict[int, OutputOption] | None = None  # by index, for outputs that are not sent as plain tensors
    shared_memory_bytes: int = 0  # size of the inputs that were in shared memory


class InferCall(NamedTuple):
    """A decoded v2 inference request."""

    inputs: list[InputTensor]  # in the signature's order, one for every input
    options: Options
