"""Traces: what one request in so many took where, as JSON entries of Triton's trace file form.

lane (a batch came back) ─> record ─> due? ─> entries in memory ─> gateway.triton.trace_file

Nothing is done for a request before its batch is back: the timestamps are those that the lane and the reply know anyway.
Source: Triton's trace extension, "JSON Trace Output".
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gateway.outputs import Outputs, OutputTensor
from gateway.request import ABSENT, InputTensor, Request
from services.batch import ReplyHeader
from services.bytes_tensor import decode_elements
from services.datatypes import BYTES, NUMPY
from services.manifest import Manifest
from services.tensor import TensorSpec

if TYPE_CHECKING:
    from gateway.outstanding import Outstanding

ELEMENTS_MAX = 16_384  # of a tensor in a trace; of larger ones the shape alone is told
KEPT_MAX = 4096  # traces that wait to be written
_PID_SHIFT = 28  # ids are unique among the gateways, and exact as a JSON number

log = logging.getLogger("millrace.trace")

Entry = dict[str, Any]
Trace = list[Entry]


@dataclass(slots=True)
class Sampler:
    """Which requests of a model are traced: every `rate`-th, as long as `claim` grants it."""

    rate: int
    tensors: bool
    claim: Callable[[int], int]
    seen: int = 0

    def due(self, requests: Sequence[Request]) -> list[int]:
        """Places of the requests to trace."""
        first = self.seen + 1
        counted = [place for place, request in enumerate(requests) if request.counted]
        self.seen += len(counted)
        wanted = [place for number, place in enumerate(counted, first) if number % self.rate == 0]
        return wanted[: self.claim(len(wanted))] if wanted else []


class Traces:
    """`on`: whether anything is traced. `sampler(model)`: None where that model is not."""

    def __init__(self) -> None:
        self.on = False
        self.sampler: Callable[[str], Sampler | None] = lambda _: None
        self.kept: list[tuple[str, Trace]] = []  # with the model's name
        self.lost = 0
        self._ids = itertools.count((os.getpid() << _PID_SHIFT) + 1)

    def batch(
        self,
        manifest: Manifest,
        outstanding: Outstanding,
        header: ReplyHeader,
        live: Sequence[Request],
        outputs: Outputs | None,
        end: float,
    ) -> None:
        """A batch came back at `end`. `live`: its requests that did not fail, whose `outputs` these are."""
        try:
            shares = [] if outputs is None else outputs.replies([request.rows for request in live])
            replies = dict(zip(map(id, live), shares, strict=False))
            requests = outstanding.requests
            told = [replies.get(id(request)) for request in requests]
            self.record(manifest, requests, told, outstanding.put, header, end)
        except Exception:
            log.exception("a trace could not be made")

    def record(
        self,
        manifest: Manifest,
        requests: Sequence[Request],
        replies: Sequence[Sequence[OutputTensor] | None],
        put: float,
        header: ReplyHeader,
        end: float,
    ) -> None:
        """Requests of a batch that came back at `end`. `replies`: None for those that failed."""
        sampler = self.sampler(manifest.model)
        if sampler is None:
            return
        for place in sampler.due(requests):
            if len(self.kept) >= KEPT_MAX:
                self.lost += 1
                continue
            request = requests[place]
            trace_id = next(self._ids)
            trace: Trace = [
                {
                    "id": trace_id,
                    "model_name": manifest.model,
                    "model_version": manifest.version,
                    "request_id": request.id,
                },
                {"id": trace_id, "timestamps": _timestamps(request.arrival, put, header, end)},
            ]
            if sampler.tensors:
                trace += _tensors(trace_id, manifest, request, replies[place])
            self.kept.append((manifest.model, trace))


def _timestamps(arrival: float, put: float, header: ReplyHeader, end: float) -> list[Entry]:
    """Nanoseconds of the monotonic clock, none later than the end."""
    start = put + header.queue_s
    input_end = start + header.input_s
    output_start = input_end + header.infer_s
    points = (
        ("REQUEST_START", arrival),
        ("QUEUE_START", arrival),
        ("COMPUTE_START", start),
        ("COMPUTE_INPUT_END", input_end),
        ("COMPUTE_OUTPUT_START", output_start),
        ("COMPUTE_END", output_start + header.output_s),
        ("REQUEST_END", end),
    )
    return [{"name": name, "ns": round(min(at, end) * 1e9)} for name, at in points]


def _tensors(
    trace_id: int, manifest: Manifest, request: Request, reply: Sequence[OutputTensor] | None
) -> Iterator[Entry]:
    for spec, given in zip(manifest.signature.inputs, request.inputs, strict=False):
        if given.shape != ABSENT.shape:
            yield _activity(trace_id, "TENSOR_QUEUE_INPUT", spec, given.shape, _values(spec.datatype, given))
    for spec, taken in zip(manifest.signature.outputs, reply or (), strict=False):
        yield _activity(trace_id, "TENSOR_BACKEND_OUTPUT", spec, taken.shape, taken.array)


def _values(datatype: str, tensor: InputTensor) -> Any:
    data: Any = tensor.data
    raw = memoryview(data.tobytes() if isinstance(data, np.ndarray) else data).cast("B")
    return decode_elements(raw) if datatype == BYTES else np.frombuffer(raw, NUMPY[datatype])


def _activity(trace_id: int, activity: str, spec: TensorSpec, shape: Sequence[int], values: Any) -> Entry:
    size = len(values) if isinstance(values, list) else values.size
    elements = [] if size > ELEMENTS_MAX else values if isinstance(values, list) else values.ravel().tolist()
    shown = (element.decode(errors="replace") if isinstance(element, bytes) else str(element) for element in elements)
    tensor = {
        "name": spec.name,
        "data": ",".join(shown),
        "shape": ",".join(map(str, shape)),
        "dtype": spec.datatype,
    }
    return {"id": trace_id, "activity": activity, "tensor": tensor}
