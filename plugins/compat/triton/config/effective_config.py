"""Builds the complete ModelConfig of a version in JSON form: its own configuration plus the values in effect.

Manifest (signature, config, configuration as uploaded) ─> {"name": …, "max_batch_size": …, "input": […], …}
Proto field names, numbers as numbers, defaults written out, as in the v2 reference's extension "model_configuration".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.plugins.compat.triton.config.config import NUMBERS, from_document
from millstream.services.model.formats import formats, platform_of
from millstream.services.model.manifest import Manifest
from millstream.services.model.names import FILE
from millstream.services.model.signature import TensorSpec

_GPU, _CPU = 1, 2


def effective_config(manifest: Manifest) -> dict[str, Any]:
    """Return the complete configuration of a version, whether or not it came with one."""
    message = from_document(manifest.triton).message
    message.name = manifest.model
    message.platform, message.backend = platform_of(manifest)
    of = formats().get(manifest.source_format)
    message.default_model_filename = message.default_model_filename or (of.file if of is not None else "") or FILE
    batching = manifest.signature.batching
    message.max_batch_size = manifest.config.rows_max if batching else 0
    _complete_tensors(message.input, manifest.signature.inputs, batching)
    _complete_tensors(message.output, manifest.answered.outputs, batching)
    _complete_policies(message, manifest)
    if not manifest.parts:
        _complete_instances(message, manifest)
    return complete_document(message)


def _complete_tensors(tensors: Any, specs: Sequence[TensorSpec], batching: bool) -> None:
    """Add the tensors of the signature that the configuration does not list."""
    listed = {tensor.name for tensor in tensors}
    for spec in specs:
        if spec.name not in listed:
            dims = spec.shape[1:] if batching else spec.shape
            tensor = tensors.add(name=spec.name, data_type=NUMBERS[spec.datatype], dims=dims or (1,))
            if not dims:  # a scalar: a configuration must write dims [1] with an empty reshape
                tensor.reshape.SetInParent()


def _complete_policies(message: Any, manifest: Manifest) -> None:
    policy = message.version_policy
    if policy.WhichOneof("policy_choice") is None:
        if manifest.origin is None:  # every uploaded version is served
            policy.all.SetInParent()
        else:
            policy.latest.num_versions = 1
    optimization = message.optimization
    for memory in (optimization.input_pinned_memory, optimization.output_pinned_memory):
        if not memory.ListFields():
            memory.enable = True
    if manifest.parts:
        if message.WhichOneof("scheduling_choice") is None:  # a graph of another form
            message.ensemble_scheduling.SetInParent()
    elif manifest.signature.batching:
        message.dynamic_batching.SetInParent()
    else:
        message.ClearField("dynamic_batching")


def _complete_instances(message: Any, manifest: Manifest) -> None:
    gpu = manifest.config.pools[:1] in {("gpu",), ("tensorrt",)}
    if not message.instance_group:
        message.instance_group.add(count=max(1, manifest.config.instances_max))
    for number, group in enumerate(message.instance_group):
        group.name = group.name or f"{manifest.model}_{number}"
        group.kind = group.kind or (_GPU if gpu else _CPU)
        group.count = group.count or 1


def complete_document(message: Any) -> dict[str, Any]:
    """Return a message as JSON with default values written out; unset messages and oneofs are omitted."""
    document: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            document[field.name] = _many(field, value)
        elif field.message_type is not None or field.containing_oneof is not None:
            if message.HasField(field.name):
                document[field.name] = _one(field, value)
        else:
            document[field.name] = _one(field, value)
    return document


def _many(field: Any, values: Any) -> Any:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        kind = entry.fields_by_name["value"]
        return {str(key): _one(kind, values[key]) for key in sorted(values)}
    return [_one(field, value) for value in values]


def _one(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return complete_document(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    return value
