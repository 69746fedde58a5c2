"""Triton's extensions for tensors, clients' shared memory and classification; labels of a batch's scores.

input in shared memory ─> its bytes          output ─> OutputOption ─> classes as text, or written to shared memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from millstream.gateway.tensors.input_plans import raw_tensor
from millstream.gateway.tensors.inputs import Extent, InputPlan, InputTensor
from millstream.gateway.tensors.outputs import Column, Outputs, OutputTensor
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import BYTES
from millstream.services.model.signature import Classes, Signature, TensorSpec


class OutputTarget(Protocol):
    """A part of a client's memory that an output is written to."""

    def write(self, data: bytes | memoryview, output: str) -> None:
        """Write the output's bytes. Raises Failure(INVALID) when the part is too small for them."""


@runtime_checkable
class ClientRegions(Protocol):
    """The shared memory that clients registered. A plug-in adds it."""

    def read(self, name: str, offset: int, size_bytes: int) -> bytes:
        """Return a copy of these bytes of a region. Raises Failure."""

    def target(self, name: str, offset: int, size_bytes: int) -> OutputTarget:
        """Return a part of a region for an output. Raises Failure."""


class Span(NamedTuple):
    """A part of a registered region."""

    region: str
    offset: int
    size_bytes: int


class OutputOption(NamedTuple):
    """What a request asks for instead of an output's tensor in the reply."""

    classes: int = 0  # how many of the best classes to send instead of the tensor; 0: the tensor
    target: OutputTarget | None = None  # where the tensor goes; None: into the reply


class Extensions:
    """The extensions for the tensors of one version.

    `labels`: class names, by output; `labelled`: adds labels to the outputs of a batch, if the version answers them;
    `bytes_max`: limit on one input in shared memory, which is None where it is not available.
    """

    def __init__(
        self,
        signature: Signature,
        labels: Mapping[str, Sequence[str]],
        memory: ClientRegions | None,
        bytes_max: int,
        labelled: LabelledOutputs | None = None,
    ) -> None:
        self._signature = signature
        self.labelled = labelled
        #: index of the output that labels are made of; None: the version answers none
        self.classes = next((at for at, spec in enumerate(signature.outputs) if spec.on_request), None)
        #: class names of each output, in the signature's order; () where there are none
        self.labels = [labels.get(spec.name, ()) for spec in signature.outputs]
        self._memory = memory
        self._bytes_max = bytes_max

    def option(self, index: int, classes: int, span: Span | None) -> OutputOption | None:
        """Return the option of the output at `index`, checked; None: its tensor goes into the reply.

        `classes`: how many the request asks for instead of the tensor, 0: none; `span`: where it asks for the tensor.
        Raises Failure: INVALID, UNSUPPORTED.
        """
        spec = self._signature.outputs[index]
        if classes and span is not None:
            raise invalid(f"shared memory can't be used with classification for output '{spec.name}'")
        if classes:
            check_classifiable(spec)
            return OutputOption(classes=classes)
        if span is None:
            return None
        return OutputOption(target=self._registered().target(*span))

    def read(self, plan: InputPlan, extent: Extent, span: Span) -> InputTensor:
        """Return a copy of the input in `span`, checked. Raises Failure."""
        if plan.datatype != BYTES and span.size_bytes != extent.size_bytes:
            raise plan.size_mismatch(extent, span.size_bytes)
        if span.size_bytes > self._bytes_max:
            raise Failure(
                Code.TOO_LARGE, f"an input of {span.size_bytes} bytes exceeds the limit of {self._bytes_max} bytes"
            )
        return raw_tensor(plan, extent, memoryview(self._registered().read(*span)))

    def classified(self, index: int, output: OutputTensor, classes: int) -> OutputTensor:
        """Return the best classes of output `index` as BYTES."""
        return classify(output, classes, self.labels[index], batching=self._signature.batching)

    def _registered(self) -> ClientRegions:
        if self._memory is None:
            raise Failure(Code.UNSUPPORTED, "client shared memory is not enabled on this server")
        return self._memory


Array = np.ndarray[Any, Any]


class LabelledOutputs:
    """Adds label and score to the outputs of a version, before the output that they are made of."""

    def __init__(self, signature: Signature, classes: Classes, labels: Sequence[str]) -> None:
        self._at = next(at for at, spec in enumerate(signature.outputs) if spec.name == classes.output)
        self._count = classes.answered
        self._softmax = classes.scores == "softmax"
        self._labels = np.array([label.encode() for label in labels], object)

    def add(self, outputs: Outputs, rows: Sequence[int]) -> Outputs:
        """Return the outputs with two more columns. `rows`: how many each request of the batch has."""
        column = outputs.columns[self._at]
        assert isinstance(column.array, np.ndarray)
        scores = _comparable(column.datatype, column.array)
        scores = scores.astype(np.float32) if scores.dtype == np.float16 else scores
        if self._count is None:
            best, values = _best_class(scores)
        else:
            best, values = _best_classes(scores, self._count, softmax=self._softmax)
        inner = best.shape[1:] if outputs.batching else best.shape
        found: list[list[bytes]] = []
        at = 0
        for count in rows:
            part = best[at : at + count] if outputs.batching else best
            found.append(self._labels[np.ravel(part)].tolist())
            at += count
        made = (Column(BYTES, inner, found), Column("FP32", inner, values))
        return outputs._replace(columns=[*outputs.columns[: self._at], *made, *outputs.columns[self._at :]])


def _best_class(scores: Array) -> tuple[Array, Array]:
    """Return the index and the probability of the best class, without the last dimension of `scores`."""
    highest = scores.max(-1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):  # of NaN and infinities
        return scores.argmax(-1), (1 / np.exp(scores - highest).sum(-1)).astype(np.float32)


def _best_classes(scores: Array, count: int, *, softmax: bool) -> tuple[Array, Array]:
    """Return the indices of the best classes, the best first, and their probabilities: of all, or each of its own."""
    below = -scores
    if scores.shape[-1] > count:  # NaN counts as the largest number, so as the worst class
        order = np.argpartition(below, count - 1, -1)[..., :count]
        below = np.take_along_axis(below, order, -1)
        ranks = np.argsort(below, axis=-1, kind="stable")
        order = np.take_along_axis(order, ranks, -1)
    else:
        order = ranks = np.argsort(below, axis=-1, kind="stable")
    below = np.take_along_axis(below, ranks, -1)
    with np.errstate(invalid="ignore", over="ignore"):  # of NaN, infinities, and numbers that are far below 0
        if softmax:
            highest = scores.max(-1, keepdims=True)
            values = np.exp(-below - highest) / np.exp(scores - highest).sum(-1, keepdims=True)
        else:
            values = 1 / (1 + np.exp(below))
    return order, values.astype(np.float32)


def check_classifiable(spec: TensorSpec) -> None:
    """Raise Failure(INVALID) for an output of a datatype whose values cannot be ranked."""
    if spec.datatype in {"BOOL", BYTES}:
        raise invalid(f"class result not available for output '{spec.name}' due to its datatype {spec.datatype}")


def classify(output: OutputTensor, count: int, labels: Sequence[str], *, batching: bool) -> OutputTensor:
    """Return the `count` best classes of each row of scores, or of the whole output when the version does not batch.

    The labels, by index, may be fewer than the classes. Returns BYTES of shape (rows, min(count, classes)), without
    rows when the version does not batch.
    """
    assert isinstance(output.array, np.ndarray)
    scores = _comparable(output.datatype, output.array)
    rows = scores.reshape(output.shape[0], -1) if batching and scores.size else scores.reshape(1, -1)
    if batching and not scores.size:
        return OutputTensor(BYTES, (output.shape[0], min(count, prod(output.shape[1:]))), [])
    best = min(count, rows.shape[1])
    elements = [_text(row, index, labels) for row in rows for index in _ranking(row)[:best]]
    return OutputTensor(BYTES, (len(rows), best) if batching else (best,), elements)


def _comparable(datatype: str, array: Array) -> Array:
    if datatype == "BF16":  # 16 bits that are the upper half of an FP32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def _ranking(row: np.ndarray[Any, Any]) -> list[int]:
    """Return the indices of `row` by descending value. Equal values keep their order, NaN comes last."""
    if row.dtype.kind == "f":
        row = np.where(np.isnan(row), -np.inf, row)
    ascending = np.argsort(row[::-1], kind="stable")
    ranking: list[int] = (len(row) - 1 - ascending[::-1]).tolist()
    return ranking


def _text(row: np.ndarray[Any, Any], index: int, labels: Sequence[str]) -> bytes:
    value = row[index]
    text = f"{value:.6f}:{index}" if row.dtype.kind == "f" else f"{value}:{index}"
    if index < len(labels) and labels[index]:
        text += f":{labels[index]}"
    return text.encode()
