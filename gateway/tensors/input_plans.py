"""The inputs of a version as a request must bring them, whatever protocol it comes by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from millstream.gateway.tensors.elements import check_strings, normal_booleans
from millstream.gateway.tensors.input_plan import Extent, InputPlan
from millstream.gateway.tensors.inputs import ABSENT, InputTensor
from millstream.gateway.tensors.json_document import shown
from millstream.gateway.tensors.json_text import DEFAULT_LIMITS, JsonLimits
from millstream.services.errors import Failure, invalid
from millstream.services.model.datatypes import BYTES
from millstream.services.model.signature import Signature


class InputPlans:
    """`rows_max`: rows of one request at most. `json_limits`: of the JSON documents that bring the inputs."""

    def __init__(
        self, model: str, signature: Signature, rows_max: int, json_limits: JsonLimits = DEFAULT_LIMITS
    ) -> None:
        self.model = model
        self.json_limits = json_limits
        self.signature = signature
        self._optional = any(spec.optional for spec in signature.inputs)
        self.by_name = {
            spec.name: InputPlan(model, index, spec, signature.batching, rows_max)
            for index, spec in enumerate(signature.inputs)
        }

    def __len__(self) -> int:
        return len(self.by_name)

    def __iter__(self) -> Iterator[InputPlan]:
        return iter(self.by_name.values())

    def named(self, name: str) -> InputPlan:
        """The input of this name. Raises Failure(INVALID)."""
        plan = self.by_name.get(name)
        if plan is None:
            raise invalid(f"unexpected inference input '{shown(name)}' for model '{self.model}'")
        return plan

    def complete(self, found: Sequence[InputTensor | None]) -> list[InputTensor]:
        """`found`, in the signature's order, ABSENT in place of optional inputs. Raises Failure(INVALID): one is missing.

        A version that batches learns from its inputs how many rows it is asked for: at least one has to be there.
        """
        inputs = [tensor for tensor in found if tensor is not None]
        if len(inputs) == len(found):
            return inputs
        if not self._optional or (not inputs and self.signature.batching):
            raise self._missing(found)
        if any(tensor is None and not plan.optional for plan, tensor in zip(self, found, strict=True)):
            raise self._missing(found)
        return [ABSENT if tensor is None else tensor for tensor in found]

    def rows_differ(self, plan: InputPlan) -> Failure:
        return invalid(f"input '{plan.name}' batch size does not match other inputs for '{self.model}'")

    def twice(self, plan: InputPlan) -> Failure:
        return invalid(f"input '{plan.name}' already exists in request")

    def _missing(self, found: Sequence[InputTensor | None]) -> Failure:
        got = [plan.name for plan, tensor in zip(self, found, strict=True) if tensor is not None]
        required = [plan.name for plan in self if not plan.optional] or [plan.name for plan in self]
        lacking = [name for name in required if name not in got]
        least = f"between {len(required)} and " if self._optional else ""
        return invalid(
            f"expected {least}{len(found)} inputs but got {len(got)} inputs for model '{self.model}'. Got input(s) {got}, "
            f"but missing required input(s) {lacking}. Please provide all required input(s)."
        )


def raw_tensor(plan: InputPlan, extent: Extent, data: memoryview) -> InputTensor:
    """A tensor in raw form (millstream.services.model.datatypes), checked. Raises Failure(INVALID)."""
    if plan.datatype == BYTES:
        check_strings(plan, extent, data)
    elif len(data) != extent.size_bytes:
        raise plan.size_mismatch(extent, len(data))
    elif not plan.opaque:
        return InputTensor(extent.shape, normal_booleans(data), len(data))
    return InputTensor(extent.shape, data, len(data))
