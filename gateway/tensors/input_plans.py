"""All inputs of a version, and the check that a request has them, in order. Used by every protocol."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.gateway.tensors.elements import check_strings, normalize_booleans
from millstream.gateway.tensors.examples import BodyWriter, advice
from millstream.gateway.tensors.inputs import ABSENT, Extent, InputPlan, InputTensor
from millstream.gateway.tensors.json_document import excerpt
from millstream.gateway.tensors.json_text import DEFAULT_LIMITS, JsonLimits
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import BYTES, decode_elements, encode_elements
from millstream.services.model.manifest import TrialInputs
from millstream.services.model.signature import Signature
from millstream.services.nearest_names import did_you_mean

if TYPE_CHECKING:
    from millstream.gateway.tensors.named_columns import NamedColumns
    from millstream.gateway.tensors.prepared import PreparedPlans


class UnknownInput(Failure):
    """INVALID: a request has an input `name` that the model has not."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(Code.INVALID, message)
        self.name = name


class InputPlans:
    """The inputs of one version, by name, in the signature's order.

    Attributes:
        trial: Inputs that the model is known to run; None: none are known.
        columns: The columns that a request may name in place of the inputs (named_columns.py); None: it may not.
        prepared: Plans of requests that give texts or encoded files in place of tensors (prepared.py); None: the
            version takes tensors alone.
    """

    def __init__(
        self,
        model: str,
        signature: Signature,
        rows_max: int,
        json_limits: JsonLimits = DEFAULT_LIMITS,
        trial: TrialInputs | None = None,
    ) -> None:
        self.trial = trial
        self.rows_max = rows_max
        self.columns: NamedColumns | None = None
        self.prepared: PreparedPlans | None = None
        self._advice: dict[BodyWriter, Mapping[str, Any]] = {}
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
        """Return the input of this name. Raises UnknownInput."""
        plan = self.by_name.get(name)
        if plan is None:
            hint = self._column_hint(name) if self.columns is not None else self.prepared_hint
            raise UnknownInput(name, f"unexpected inference input '{excerpt(name)}' for model '{self.model}'{hint}")
        return plan

    def is_column(self, name: str) -> bool:
        """Whether a row has one value of this name: of an input, or of a column of the one input."""
        plan = self.by_name.get(name)
        if plan is None:
            return self.columns is not None and self.columns.any_of((name,))
        return plan.is_column

    @property
    def prepared_hint(self) -> str:
        """For the end of a message: how a request gives texts or encoded files to this version; "": it takes none."""
        return "" if self.prepared is None else self.prepared.hint

    def _column_hint(self, name: str) -> str:
        """For the end of a message about an unknown name: the nearest known ones, and all."""
        assert self.columns is not None
        known = dict.fromkeys([*self.by_name, *self.columns.names])
        own = "" if len(self) > 1 else f"the input '{next(iter(self.by_name))}', or "
        return f"{did_you_mean(name, known)}: it takes {own}the columns {self.columns.text_of_names()}"

    def advise(self, failure: Failure, write: BodyWriter) -> None:
        """Add the signature, and an example in the form of `write`, to a failure about a request that does not fit."""
        if failure.code is not Code.INVALID or failure.advice is not None:
            return
        found = self._advice.get(write)
        if found is None:
            found = self._advice[write] = advice(self.model, self.signature, self.trial, write)
        failure.advice = found

    def complete(self, tensors: Sequence[InputTensor | None]) -> list[InputTensor]:
        """Return `tensors` with ABSENT in place of None, which stands for an input that the request lacks.

        A version that batches learns the number of rows from its inputs, so at least one has to be given.

        Raises:
            Failure: INVALID: a required input is missing, or a text is no category of its column.
        """
        if self.columns is not None and self.columns.closed:
            self.columns.check_texts(tensors)
        inputs = [tensor for tensor in tensors if tensor is not None]
        if len(inputs) == len(tensors):
            return inputs
        if not self._optional or (not inputs and self.signature.batching):
            raise self._missing(tensors)
        if any(tensor is None and not plan.optional for plan, tensor in zip(self, tensors, strict=True)):
            raise self._missing(tensors)
        return [ABSENT if tensor is None else tensor for tensor in tensors]

    def rows_differ(self, plan: InputPlan) -> Failure:
        return invalid(f"input '{plan.name}' batch size does not match other inputs for '{self.model}'")

    def duplicate(self, plan: InputPlan) -> Failure:
        return invalid(f"input '{plan.name}' already exists in request")

    def _missing(self, tensors: Sequence[InputTensor | None]) -> Failure:
        got = [plan.name for plan, tensor in zip(self, tensors, strict=True) if tensor is not None]
        required = [plan.name for plan in self if not plan.optional] or [plan.name for plan in self]
        lacking = [name for name in required if name not in got]
        least = f"between {len(required)} and " if self._optional else ""
        return invalid(
            f"expected {least}{len(tensors)} inputs but got {len(got)} inputs for model '{self.model}'. "
            f"Got input(s) {got}, but missing required input(s) {lacking}. Please provide all required input(s)."
        )


def raw_tensor(plan: InputPlan, extent: Extent, data: memoryview) -> InputTensor:
    """Return a checked tensor from its raw form (millstream.services.model.datatypes). Raises Failure(INVALID)."""
    if plan.datatype == BYTES:
        check_strings(plan, extent, data)
    elif len(data) != extent.size_bytes:
        raise plan.size_mismatch(extent, len(data))
    elif not plan.opaque:
        return InputTensor(extent.shape, normalize_booleans(data), len(data))
    return InputTensor(extent.shape, data, len(data))


def opened(plan: InputPlan, tensor: InputTensor, content_type: object) -> InputTensor:
    """Return a checked tensor; its elements are decoded if its content type is that of MLServer's base64 codec.

    Other content types say how MLServer's models want to see a tensor, not what its elements are.

    Raises:
        Failure: INVALID for an element that is not base64; MLServer would pass it to the model as it is.
    """
    if content_type != "base64":
        return tensor
    if plan.datatype != BYTES:
        raise invalid(f"the content type base64 is for BYTES{plan.where}, which takes {plan.datatype}")
    elements = decode_elements(bytes(tensor.data))
    for at, element in enumerate(elements):
        try:
            elements[at] = base64.b64decode(element, validate=True)
        except binascii.Error:
            raise invalid(f"element {at}{plan.where} is not base64, which its content_type says") from None
    raw = encode_elements(elements)
    return InputTensor(tensor.shape, raw, len(raw))


class CheckedInput(NamedTuple):
    """One input of a request, checked against its plan."""

    extent: Extent
    tensor: InputTensor


class Inputs(NamedTuple):
    """All inputs of a request."""

    tensors: list[InputTensor]  # in the signature's order, ABSENT for optional inputs that the request lacks
    rows: int

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


def join(plans: InputPlans, by_name: Mapping[str, CheckedInput]) -> Inputs:
    """Return `by_name` as the inputs of one request, in the signature's order.

    Raises:
        Failure: INVALID: unknown or missing names, or numbers of rows that differ.
    """
    named = {plans.named(name).name: checked for name, checked in by_name.items()}
    if len(named) < len(by_name):  # a prepared input has two names
        raise plans.duplicate(plans.named(next(iter(by_name))))
    by_name = named
    rows = 1
    first = True
    for plan in plans:
        checked = by_name.get(plan.name)
        if checked is None:
            continue
        if not first and checked.extent.rows != rows:
            raise plans.rows_differ(plan)
        rows, first = checked.extent.rows, False
    tensors = [by_name[plan.name].tensor if plan.name in by_name else None for plan in plans]
    return Inputs(plans.complete(tensors), rows)
