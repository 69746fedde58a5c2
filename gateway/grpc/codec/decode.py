"""decode: a ModelInferRequest -> inputs and options that fit the version's signature. Pure.

Source: Open Inference Protocol v2, gRPC; Triton's raw_input_contents: one entry for each input that is not in shared
memory, in their order. Then no input may have typed contents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from millstream.gateway.grpc.codec.parameters import read_request_options, read_tensor
from millstream.gateway.grpc.codec.typed_contents import no_data, tensor_of
from millstream.gateway.scheduling.caller import DEFAULT_OPTIONS, RequestOptions
from millstream.gateway.tensors.input_plan import Extent, InputPlan
from millstream.gateway.tensors.input_plans import InputPlans, opened, raw_tensor
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.json_document import excerpt
from millstream.gateway.tensors.named_columns import columns_given, from_columns, plans_of_columns
from millstream.gateway.tensors.output_options import Extensions, OutputOption
from millstream.gateway.v2.options import ID_CHARACTERS_MAX, read_span
from millstream.services.errors import Failure, invalid


class GrpcCall(NamedTuple):
    """A decoded request."""

    inputs: list[InputTensor]
    rows: int
    options: RequestOptions
    outputs: tuple[int, ...] | None  # requested outputs, as indices in the signature; None: all
    id: str = ""
    output_options: dict[int, OutputOption] | None = None  # by index, for outputs that are not sent as plain tensors
    shared_memory_bytes: int = 0  # size of the inputs that were in shared memory
    by_column: bool = False  # the request gave columns by name, of which the inputs were made


class GrpcDecoder:
    """Decodes the requests of one version.

    Args:
        plans: plans of the version's inputs.
        extensions: the version's extensions for tensors.
    """

    def __init__(self, plans: InputPlans, extensions: Extensions) -> None:
        self._model = plans.model
        self._extensions = extensions
        self._plans = plans
        self._outputs = {spec.name: index for index, spec in enumerate(plans.signature.outputs)}

    def decode(self, request: Any) -> GrpcCall:
        """Return a ModelInferRequest in decoded form.

        Raises Failure: INVALID; TOO_LARGE; UNSUPPORTED for sequences, and for shared memory where it is not allowed.
        """
        by_column = False
        try:
            inputs, rows, shared_memory_bytes = self._inputs(self._plans, request)
        except Failure as failure:
            inputs, rows, shared_memory_bytes = self._columns(failure, request)
            by_column = True
        options = read_request_options(request.parameters) if request.parameters else DEFAULT_OPTIONS
        output_options: dict[int, OutputOption] = {}
        outputs = self._requested_outputs(request.outputs, output_options) if request.outputs else None
        if len(request.id) > ID_CHARACTERS_MAX:
            raise invalid(f"the request's 'id' is longer than {ID_CHARACTERS_MAX} characters")
        return GrpcCall(
            inputs, rows, options, outputs, request.id, output_options or None, shared_memory_bytes, by_column
        )

    def _columns(self, failure: Failure, request: Any) -> tuple[list[InputTensor], int, int]:
        """Return what `_inputs` does of a request, refused with `failure`, that gives columns by name."""
        columns = columns_given(self._plans, failure, [item.name for item in request.inputs])
        given = [(item.name, item.datatype, item.shape) for item in request.inputs]
        sent = plans_of_columns(self._plans, columns, given)
        tensors, _, shared_memory_bytes = self._inputs(sent, request)
        inputs, rows = from_columns(columns, sent, tensors)
        return inputs, rows, shared_memory_bytes

    def _inputs(self, plans: InputPlans, request: Any) -> tuple[list[InputTensor], int, int]:
        """Return the inputs, their rows, and the bytes of those in shared memory."""
        raws = request.raw_input_contents
        tensors: list[InputTensor | None] = [None] * len(plans)
        rows = -1
        at = shared_bytes = 0
        for item in request.inputs:
            plan = plans.named(item.name)
            if tensors[plan.index] is not None:
                raise plans.duplicate(plan)
            extent = plan.fit(item.datatype, tuple(item.shape))
            if rows != extent.rows:
                if rows >= 0:
                    raise plans.rows_differ(plan)
                rows = extent.rows
            parameters = read_tensor(item.parameters, plan.where) if item.parameters else {}
            span = read_span(parameters, plan.where) if parameters else None
            if span is not None:
                if item.HasField("contents") and item.contents.ByteSize():
                    raise invalid(f"unexpected 'contents' for an input in shared memory{plan.where}")
                tensor = self._extensions.read(plan, extent, span)
                shared_bytes += tensor.size_bytes
            elif raws:
                tensor = self._raw(plan, extent, item, raws, at)
                at += 1
            else:
                tensor = tensor_of(plan, extent, item.contents)
            tensors[plan.index] = opened(plan, tensor, parameters.get("content_type")) if parameters else tensor
        if at != len(raws):
            raise invalid(f"expected {at} entries in raw_input_contents but got {len(raws)} for model '{self._model}'")
        return plans.complete(tensors), rows if rows >= 0 else 1, shared_bytes

    def _raw(self, plan: InputPlan, extent: Extent, item: Any, raws: Any, at: int) -> InputTensor:
        if item.HasField("contents") and item.contents.ByteSize():
            raise invalid(
                f"contents field must not be specified when using raw_input_contents for '{plan.name}' "
                f"for model '{self._model}'"
            )
        if at >= len(raws):
            raise no_data(plan)
        return raw_tensor(plan, extent, memoryview(raws[at]))

    def _requested_outputs(self, outputs: Any, output_options: dict[int, OutputOption]) -> tuple[int, ...]:
        requested: dict[int, None] = {}
        for item in outputs:
            index = self._outputs.get(item.name)
            if index is None:
                raise invalid(f"unexpected inference output '{excerpt(item.name)}' for model '{self._model}'")
            if index in requested:
                raise invalid(f"output '{item.name}' already exists in request")
            if item.parameters:
                where = f" for output '{item.name}'"
                parameters = read_tensor(item.parameters, where)
                option = self._extensions.option(
                    index, parameters.get("classification", 0), read_span(parameters, where)
                )
                if option is not None:
                    output_options[index] = option
            requested[index] = None
        return tuple(requested)
