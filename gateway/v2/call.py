"""What is left of an inference request once its bytes are read. Pure data."""

from __future__ import annotations

from typing import NamedTuple

from gateway.request import InputTensor


class InferCall(NamedTuple):
    """A decoded v2 inference request: what the dispatcher needs, and what the reply needs to know of it.

    A tuple because one is made for each request, and nothing in Python is made faster.
    """

    inputs: list[InputTensor]  # in the signature's order, one for every input
    rows: int  # dimension 0 when the version batches; 1 otherwise
    id: str = ""  # "": none was given
    outputs: list[tuple[int, bool]] | None = None  # (index in the signature, binary) as asked; None: all of them
    binary_default: bool = False  # the form of the outputs when `outputs` is None
    timeout_s: float | None = None
    priority: int = 0  # 0: default; 1: highest; larger numbers come later


#: every field of an InferCall after `inputs`
CallRest = tuple[int, str, list[tuple[int, bool]] | None, bool, float | None, int]
