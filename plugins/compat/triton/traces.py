"""Traces every n-th request: timestamps, and tensors if requested, as JSON entries of Triton's trace file.

lane (a batch has its reply) ─> record ─> due? ─> entries in memory ─> trace_file

A request costs nothing before its batch has its reply: lane and reply have the timestamps anyway.
Source: Triton's trace extension, "JSON Trace Output".
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.inputs import ABSENT, InputTensor
from millstream.gateway.tensors.outputs import Outputs, OutputTensor, Reply
from millstream.services.model.datatypes import BYTES, NUMPY, decode_elements
from millstream.services.model.manifest import Manifest
from millstream.services.model.signature import TensorSpec
from millstream.services.wire.batch import ReplyHeader

if TYPE_CHECKING:
    from millstream.gateway.scheduling.lane_state import InFlightBatch

ELEMENTS_MAX = 16_384  # elements of a tensor in a trace; of a larger tensor only the shape is written
ELEMENTS_BYTES_MAX = 256 << 10  # bytes of a BYTES tensor in a trace; of a larger one only the shape is written
TRACE_BYTES_MAX = 8 << 20  # text of all tensors in a trace; of tensors beyond it only the shape is written
KEPT_MAX = 4096  # traces that wait to be written; further ones are dropped and counted
KEPT_BYTES_MAX = 32 << 20  # bytes of their text; further traces are dropped and counted
_ELEMENT_BYTES_MAX = 25  # a number's text and a comma
_ESCAPED_BYTES_MAX = 12  # a character in JSON: two escapes of six
_TRACE_BYTES = 1 << 10  # an entry's text without its tensor and request id
_PID_SHIFT = 28  # ids are unique among the gateways, and exact as a JSON number

log = logging.getLogger("millstream.trace")

Entry = dict[str, Any]
Trace = list[Entry]


@dataclass(slots=True)
class Sampler:
    """Selects the requests of a model to trace: every `rate`-th. `claim(n)`: returns how many of n may be traced."""

    rate: int
    tensors: bool
    claim: Callable[[int], int]
    seen: int = 0

    def due(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests to trace."""
        first = self.seen + 1
        counted = [request for request in requests if request.counted and not request.part]
        self.seen += len(counted)
        due = [request for number, request in enumerate(counted, first) if number % self.rate == 0]
        return due[: self.claim(len(due))] if due else []


class Elements:
    """A copy of a tensor's elements. `str` returns their text; call it in a thread, since it may take milliseconds."""

    __slots__ = ("_elements", "text_bytes_max")

    def __init__(self, elements: np.ndarray[Any, Any] | bytes | list[bytes]) -> None:
        self._elements = elements
        if isinstance(elements, np.ndarray):
            self.text_bytes_max = elements.size * _ELEMENT_BYTES_MAX
        else:
            self.text_bytes_max = _ESCAPED_BYTES_MAX * (
                len(elements) if isinstance(elements, bytes) else _raw_bytes(elements)
            )

    def __str__(self) -> str:
        if isinstance(self._elements, np.ndarray):
            return ",".join(map(str, self._elements.ravel().tolist()))
        elements = decode_elements(self._elements) if isinstance(self._elements, bytes) else self._elements
        return ",".join(element.decode(errors="replace") for element in elements)


def text_bytes_max(trace: Trace) -> int:
    """Return a bound on the length of a trace's text."""
    size = _TRACE_BYTES * len(trace) + _ESCAPED_BYTES_MAX * len(trace[0]["request_id"])
    for tensor in (entry["tensor"] for entry in trace if "tensor" in entry):
        size += _ESCAPED_BYTES_MAX * len(tensor["name"])
        size += tensor["data"].text_bytes_max if isinstance(tensor["data"], Elements) else 0
    return size


class Traces:
    """The traces of one gateway that wait to be written.

    `on`: whether any model is traced. `sampler(model)`: returns None for a model that is not traced. `kept`: traces,
    with the names of their models. `lost`: how many traces were dropped.
    """

    def __init__(self) -> None:
        self.on = False
        self.sampler: Callable[[str], Sampler | None] = lambda _: None
        self.kept: list[tuple[str, Trace]] = []
        self.lost = 0
        self._kept_bytes = 0
        self._ids = itertools.count((os.getpid() << _PID_SHIFT) + 1)

    def take(self) -> list[tuple[str, Trace]]:
        """Remove and return the kept traces, with the names of their models."""
        kept, self.kept, self._kept_bytes = self.kept, [], 0
        return kept

    def batch(
        self, batch: InFlightBatch, header: ReplyHeader, live: Sequence[Request], outputs: Outputs | None, end: float
    ) -> None:
        """Trace a batch whose reply came at `end`. `live`: its requests that did not fail; `outputs`: their outputs."""
        shares = [] if outputs is None else outputs.replies([request.rows for request in live])
        replies = dict(zip(map(id, live), shares, strict=False))
        self.record(batch.lane.manifest, batch.requests, replies, header, batch.put_at, end)

    def split(
        self, manifest: Manifest, request: Request, reply: Reply, header: ReplyHeader, put_at: float, end: float
    ) -> None:
        """Trace a request that ran in parts, with the times of the last one."""
        self.record(manifest, [request], {id(request): reply}, header, put_at, end)

    def record(
        self,
        manifest: Manifest,
        requests: Sequence[Request],
        replies: Mapping[int, Sequence[OutputTensor]],
        header: ReplyHeader,
        put_at: float,
        end: float,
    ) -> None:
        """Trace the requests that are due, from their put to the reply at `end`. `replies`: by the id of a request."""
        sampler = self.sampler(manifest.model)
        for request in () if sampler is None else sampler.due(requests):
            if len(self.kept) >= KEPT_MAX or self._kept_bytes >= KEPT_BYTES_MAX:
                self.lost += 1
                continue
            trace_id = next(self._ids)
            trace: Trace = [
                {
                    "id": trace_id,
                    "model_name": manifest.model,
                    "model_version": manifest.version,
                    "request_id": request.id or request.request_id.decode(),
                },
                {"id": trace_id, "timestamps": _timestamps(request.arrival, put_at, header, end)},
            ]
            if sampler is not None and sampler.tensors:
                trace += _tensors(trace_id, manifest, request, replies.get(id(request)))
            self._keep(manifest.model, trace)

    def _keep(self, model: str, trace: Trace) -> None:
        size = text_bytes_max(trace)
        if self._kept_bytes + size > KEPT_BYTES_MAX:
            self.lost += 1
            return
        self._kept_bytes += size
        self.kept.append((model, trace))


def build(*_: object) -> Traces:
    """Return what records the traces of a gateway; its settings are those of trace.py."""
    return Traces()


def _timestamps(arrival: float, put: float, header: ReplyHeader, end: float) -> list[Entry]:
    """Return the timestamps in nanoseconds of the monotonic clock, none later than `end`."""
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
    free_bytes = TRACE_BYTES_MAX
    traced: list[tuple[str, TensorSpec, Sequence[int], Elements | None]] = [
        ("TENSOR_QUEUE_INPUT", spec, tensor.shape, _of_input(spec.datatype, tensor))
        for spec, tensor in zip(manifest.signature.inputs, request.inputs, strict=False)
        if tensor.shape != ABSENT.shape
    ]
    traced += [
        ("TENSOR_BACKEND_OUTPUT", spec, output.shape, _of_output(output.array))
        for spec, output in zip(manifest.answered.outputs, reply or (), strict=False)
    ]
    for activity, spec, shape, values in traced:
        if values is not None:
            free_bytes -= values.text_bytes_max
        yield _activity(trace_id, activity, spec, shape, values if free_bytes >= 0 else None)


def _of_input(datatype: str, tensor: InputTensor) -> Elements | None:
    bytes_max = ELEMENTS_BYTES_MAX if datatype == BYTES else ELEMENTS_MAX * NUMPY[datatype].itemsize
    if math.prod(tensor.shape) > ELEMENTS_MAX or tensor.size_bytes > bytes_max:
        return None
    data: Any = tensor.data
    copied = data.tobytes() if isinstance(data, np.ndarray) else bytes(data)
    return Elements(copied if datatype == BYTES else np.frombuffer(copied, NUMPY[datatype]))


def _of_output(values: np.ndarray[Any, Any] | list[bytes]) -> Elements | None:
    if isinstance(values, np.ndarray):
        return Elements(values.copy()) if values.size <= ELEMENTS_MAX else None
    few = len(values) <= ELEMENTS_MAX and _raw_bytes(values) <= ELEMENTS_BYTES_MAX
    return Elements(list(values)) if few else None


def _raw_bytes(elements: list[bytes]) -> int:
    """Return the bytes of a BYTES tensor, with the length before each element."""
    return sum(map(len, elements)) + 4 * len(elements)


def _activity(trace_id: int, activity: str, spec: TensorSpec, shape: Sequence[int], values: Elements | None) -> Entry:
    tensor = {
        "name": spec.name,
        "data": "" if values is None else values,
        "shape": ",".join(map(str, shape)),
        "dtype": spec.datatype,
    }
    return {"id": trace_id, "activity": activity, "tensor": tensor}
