"""What a request of v2 may ask of single tensors beside their data: shared memory of the client, classification.

input  in shared memory ─> its bytes                     output ─> Ask ─> classes as text, or written to shared memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from millstream.gateway.tensors.classification import check_classifiable, classify
from millstream.gateway.tensors.input_plan import Extent, InputPlan
from millstream.gateway.tensors.input_plans import raw_tensor
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import BYTES
from millstream.services.model.signature import Signature


class OutputTarget(Protocol):
    """A part of a client's memory that a result is written to."""

    def write(self, data: bytes | memoryview, output: str) -> None:
        """Raises Failure(INVALID) when it is too small for the result."""


class ClientRegions(Protocol):
    """The registered memory of clients (millstream.gateway.triton.shared_memory)."""

    def read(self, name: str, offset: int, size_bytes: int) -> bytes:
        """Bytes of a region, copied. Raises Failure."""

    def place(self, name: str, offset: int, size_bytes: int) -> OutputTarget:
        """Where a result may go. Raises Failure."""


class Span(NamedTuple):
    """A part of a registered region."""

    region: str
    offset: int
    size_bytes: int


class OutputOption(NamedTuple):
    """`classes`: so many of the best ones in place of the tensor; 0: the tensor. `target`: where it goes; None: the reply."""

    classes: int = 0
    target: OutputTarget | None = None


class Extensions:
    """Of one version. `labels`: class names by output. `memory` None: not to be had here."""

    def __init__(
        self, signature: Signature, labels: Mapping[str, Sequence[str]], memory: ClientRegions | None, bytes_max: int
    ) -> None:
        self._signature = signature
        #: class names of each output; () where there are none
        self.labels = [labels.get(spec.name, ()) for spec in signature.outputs]
        self._memory = memory
        self._bytes_max = bytes_max

    def ask(self, index: int, classes: int, span: Span | None) -> OutputOption | None:
        """Check what is asked of output `index` (in the signature's order). None: nothing. Raises Failure(INVALID)."""
        spec = self._signature.outputs[index]
        if classes and span is not None:
            raise invalid(f"shared memory can't be used with classification for output '{spec.name}'")
        if classes:
            check_classifiable(spec)
            return OutputOption(classes=classes)
        if span is None:
            return None
        return OutputOption(target=self._registered().place(*span))

    def read(self, plan: InputPlan, extent: Extent, span: Span) -> InputTensor:
        """The input that lies in `span`, copied and checked. Raises Failure."""
        if plan.datatype != BYTES and span.size_bytes != extent.size_bytes:
            raise plan.size_mismatch(extent, span.size_bytes)
        if span.size_bytes > self._bytes_max:
            raise Failure(
                Code.TOO_LARGE, f"an input of {span.size_bytes} bytes exceeds the limit of {self._bytes_max} bytes"
            )
        return raw_tensor(plan, extent, memoryview(self._registered().read(*span)))

    def classified(self, index: int, output: OutputTensor, classes: int) -> OutputTensor:
        """The best classes of output `index` as BYTES."""
        return classify(output, classes, self.labels[index], batching=self._signature.batching)

    def _registered(self) -> ClientRegions:
        if self._memory is None:
            raise Failure(Code.UNSUPPORTED, "client shared memory is not enabled on this server")
        return self._memory
