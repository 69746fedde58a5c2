"""Caches messages without the bytes of their tensors (envelopes), so that each is parsed only once. Pure.

head (model, version, inputs, outputs) │ tag, length │ raw bytes │ tag, length │ raw bytes …
"""

from __future__ import annotations

from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.grpc.codec.decode import GrpcCall
from millstream.gateway.grpc.codec.encode import varint
from millstream.gateway.scheduling.caller import DEFAULT_OPTIONS
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.outputs import VIEW_BYTES_MIN

_RAW = b"\x3a"  # tag of raw_input_contents, field 7 with a length
_KEY_BYTES = 16  # mostly the model's name; a shorter head is never cached
_ENVELOPES_MAX = 256  # a full cache is emptied
_HEAD_BYTES_MAX = 4096

_new = tuple.__new__


class MessageEnvelope(NamedTuple):
    """A message without the bytes of its tensors."""

    plans: InputPlans
    model: str
    version: str
    marks: list[tuple[int, bytes]]  # (position, bytes that a message must have there)
    slices: list[tuple[tuple[int, ...], int, int]]  # (shape, start, end) of each input in the signature's order
    rows: int
    outputs: tuple[int, ...] | None


class Envelopes:
    """A cache of envelopes, bounded in number and size."""

    def __init__(self) -> None:
        self._cache: dict[tuple[int, bytes], MessageEnvelope] = {}

    def find(self, body: bytes | memoryview) -> MessageEnvelope | None:
        """Return the cached envelope of a message; None if there is none."""
        if type(body) is memoryview:
            return self._find_of_view(body)
        envelope = self._cache.get((len(body), body[:_KEY_BYTES]))
        if envelope is None:
            return None
        for at, mark in envelope.marks:
            if not body.startswith(mark, at):
                return None
        return envelope

    def _find_of_view(self, body: memoryview) -> MessageEnvelope | None:
        envelope = self._cache.get((len(body), bytes(body[:_KEY_BYTES])))
        if envelope is None or any(body[at : at + len(mark)] != mark for at, mark in envelope.marks):
            return None
        return envelope

    def largest_tensor(self, size_bytes: int, first: bytes) -> tuple[int, int] | None:
        """Return where the largest tensor of an arriving message is, if its envelope seems to be cached.

        Args:
            size_bytes: size of the message.
            first: its first bytes, as many as have come.

        Returns the position and the number of its bytes; None: nothing is known of the message.
        """
        envelope = self._cache.get((size_bytes, first[:_KEY_BYTES]))
        if envelope is None:
            return None
        _, at, end = max(envelope.slices, key=lambda one: one[2] - one[1])
        return at, end - at

    def learn(self, body: bytes, request: Any, plans: InputPlans, call: GrpcCall) -> None:
        """Cache the envelope of a decoded message, if all messages with it differ only in their tensors."""
        raws = request.raw_input_contents
        if (
            call.id
            or call.options is not DEFAULT_OPTIONS
            or call.output_options is not None
            or call.by_column
            or not all(plan.opaque for plan in plans)
        ):
            return
        if not raws or len(raws) != len(plans):  # inputs in shared memory, or absent
            return
        marks = [_RAW + varint(len(raw)) for raw in raws]
        head = body[: len(body) - sum(map(len, marks)) - sum(map(len, raws))]
        if not _KEY_BYTES <= len(head) <= _HEAD_BYTES_MAX or not _is_head(head):
            return
        at = len(head)
        marked = [(0, head)]
        slices: dict[int, tuple[tuple[int, ...], int, int]] = {}
        for item, mark, raw in zip(request.inputs, marks, raws, strict=True):
            if not body.startswith(mark, at):
                return
            marked.append((at, mark))
            at += len(mark) + len(raw)
            index = plans.by_name[item.name].index
            slices[index] = (call.inputs[index].shape, at - len(raw), at)
        if len(self._cache) >= _ENVELOPES_MAX:
            self._cache.clear()
        ordered = [slices[index] for index in sorted(slices)]
        self._cache[len(body), body[:_KEY_BYTES]] = MessageEnvelope(
            plans, request.model_name, request.model_version, marked, ordered, call.rows, call.outputs
        )


def inputs_of(body: bytes | memoryview, envelope: MessageEnvelope) -> list[InputTensor]:
    """Return the tensors in a message with this envelope."""
    data = body if len(body) < VIEW_BYTES_MIN else memoryview(body)
    return [_new(InputTensor, (shape, data[at:end], end - at)) for shape, at, end in envelope.slices]


def _is_head(head: bytes) -> bool:
    """Whether `head` ends at the end of a field, and contains no bytes of tensors."""
    try:
        return not pb.ModelInferRequest.FromString(head).raw_input_contents
    except DecodeError:
        return False
