"""Triton's extensions for tensors of a request: clients' shared memory and classification.

input in shared memory ─> its bytes          output ─> OutputOption ─> classes as text, or written to shared memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from millstream.gateway.tensors.classification import LabelledOutputs, check_classifiable, classify
from millstream.gateway.tensors.input_plan import Extent, InputPlan
from millstream.gateway.tensors.input_plans import raw_tensor
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import BYTES
from millstream.services.model.signature import Signature


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

    Args:
        signature: The version's signature.
        labels: Class names, by output.
        memory: Shared memory of clients; None: not available.
        bytes_max: Limit on one input in shared memory.
        labelled: Adds labels to the outputs of a batch; None: the version answers none.
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
        """Return the option of an output, checked; None: its tensor goes into the reply.

        Args:
            index: Position of the output in the signature.
            classes: How many classes the request asks for instead of the tensor; 0: the tensor.
            span: Where the request asks for the tensor; None: in the reply.

        Raises:
            Failure: INVALID, UNSUPPORTED.
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
