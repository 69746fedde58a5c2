"""A ModelInferRequest -> inputs and options that fit the version's signature. Pure.

Source: Open Inference Protocol v2, gRPC; Triton's raw_input_contents: one entry for each input that is not in shared
memory, in their order; then no input may have typed contents. "Tensor Contents": datatypes of up to 32 bits share a
field. Parameters: Triton's extensions "schedule policy", "sequence", "parameters", "classification" and "shared
memory"; MLServer, "Content Types".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from millstream.gateway.scheduling.caller import DEFAULT_OPTIONS, RequestOptions
from millstream.gateway.tensors.input_plans import InputPlans, opened, raw_tensor
from millstream.gateway.tensors.inputs import Extent, InputPlan, InputTensor
from millstream.gateway.tensors.json_document import excerpt
from millstream.gateway.tensors.named_columns import columns_given, from_columns, plans_of_columns
from millstream.gateway.tensors.output_options import Extensions, OutputOption
from millstream.gateway.v2.options import (
    ID_CHARACTERS_MAX,
    custom_parameters,
    read_output_option,
    read_parameters,
    read_span,
)
from millstream.services.errors import Failure, invalid
from millstream.services.model.datatypes import BYTES, NUMPY, encode_elements

#: datatype -> its field, and the numpy type of the field's elements; FP16 and BF16 have no field
FIELDS: dict[str, tuple[str, type[np.generic]]] = {
    "BOOL": ("bool_contents", np.bool_),
    "INT8": ("int_contents", np.int32),
    "INT16": ("int_contents", np.int32),
    "INT32": ("int_contents", np.int32),
    "INT64": ("int64_contents", np.int64),
    "UINT8": ("uint_contents", np.uint32),
    "UINT16": ("uint_contents", np.uint32),
    "UINT32": ("uint_contents", np.uint32),
    "UINT64": ("uint64_contents", np.uint64),
    "FP32": ("fp32_contents", np.float32),
    "FP64": ("fp64_contents", np.float64),
}


_PIECE_ELEMENTS = 1 << 18


def tensor_of(plan: InputPlan, extent: Extent, contents: Any) -> InputTensor:
    """Return the tensor in `contents`, an InferTensorContents. Raises Failure(INVALID)."""
    contents_fields = [(descriptor.name, values) for descriptor, values in contents.ListFields()]
    if not contents_fields:
        if extent.elements:
            raise no_data(plan)
        return InputTensor(extent.shape, b"", 0)
    field = "bytes_contents" if plan.datatype == BYTES else FIELDS.get(plan.datatype, ("", None))[0]
    if not field:
        raise invalid(f"{plan.datatype} data has no typed contents: send it in raw_input_contents{plan.where}")
    if len(contents_fields) > 1 or contents_fields[0][0] != field:
        raise invalid(f"{plan.datatype} data should be in '{field}' and nowhere else{plan.where}")
    values = contents_fields[0][1]
    if len(values) != extent.elements:
        raise _miscounted(plan, extent, len(values))
    raw = encode_elements(values) if plan.datatype == BYTES else _numbers(plan, values)
    return InputTensor(extent.shape, raw, len(raw))


def no_data(plan: InputPlan) -> Exception:
    return invalid(f"unable to find data for input tensor '{plan.name}' for model '{plan.model}' in request.")


def _numbers(plan: InputPlan, values: Any) -> bytes:
    dtype = FIELDS[plan.datatype][1]
    # In pieces, since numpy holds the interpreter's lock while it iterates.
    pieces = [
        np.fromiter(values[at : at + _PIECE_ELEMENTS], dtype, min(_PIECE_ELEMENTS, len(values) - at))
        for at in range(0, len(values), _PIECE_ELEMENTS)
    ]
    wide = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    target = NUMPY[plan.datatype]
    if target.itemsize == wide.dtype.itemsize:
        return wide.tobytes()
    narrow = wide.astype(target)
    if (narrow != wide).any():
        raise invalid(f"an element is out of the range of {plan.datatype}{plan.where}")
    return narrow.tobytes()


def _miscounted(plan: InputPlan, extent: Extent, count: int) -> Exception:
    if plan.datatype != BYTES:
        return plan.size_mismatch(extent, count * plan.item_bytes)
    return invalid(f"expected {extent.elements} strings in 'bytes_contents', got {count}{plan.where}")


def scalars(parameters: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return parameters with their values. Raises Failure(INVALID) for one that has none."""
    values = {}
    for name, parameter in parameters.items():
        field = parameter.WhichOneof("parameter_choice")
        if field is None:
            raise invalid(f"parameter '{excerpt(name)}' must be a string, a number or a boolean{where}")
        values[name] = getattr(parameter, field)
    return values


def read_request_options(parameters: Mapping[str, Any]) -> RequestOptions:
    """Return the options in a request's parameters. Raises Failure: INVALID, UNSUPPORTED for sequences."""
    values = scalars(parameters)
    values.pop(EMPTY_FINAL, None)  # of an answer in parts; any other has one reply, which is the last
    _, timeout_s, priority = read_parameters(values)
    custom = custom_parameters(values)
    if timeout_s or priority or custom:
        return RequestOptions(timeout_s, priority, parameters=custom)
    return DEFAULT_OPTIONS


#: parameter of a request that wants an empty response after the last part of its answer
EMPTY_FINAL = "triton_enable_empty_final_response"


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
    empty_final: bool = False  # whether it wants an empty response after the last part of its answer


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
            inputs, rows, options, outputs, request.id, output_options or None, shared_memory_bytes, by_column,
            EMPTY_FINAL in request.parameters and request.parameters[EMPTY_FINAL].bool_param,
        )  # fmt: skip

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
            parameters = scalars(item.parameters, plan.where) if item.parameters else {}
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
                option = read_output_option(scalars(item.parameters, where), index, self._extensions, where)
                if option is not None:
                    output_options[index] = option
            requested[index] = None
        return tuple(requested)
