"""Writes a note for each field of a configuration that this server ignores. Such fields are stored and returned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millstream.services.model.manifest import ModelConfig
from millstream.services.placement.pools import pools_text

#: `parameters` of Triton's ONNX Runtime backend, and what this server does instead
_THREADS = "`millstream up --worker-threads` sets the threads of each worker"
_PARAMETERS = {
    "intra_op_thread_count": _THREADS,
    "inter_op_thread_count": _THREADS,
    "execution_mode": "operators run one after the other",
    "enable_mem_arena": "no arena is used",
    "enable_mem_pattern": "patterns are used where all shapes are fixed",
    "memory.enable_memory_arena_shrinkage": "no arena is used",
}


def ignored_field_notes(message: Any, config: ModelConfig) -> tuple[str, ...]:
    """Return the notes, one sentence each, for the version's document."""
    return (*_scheduling(message, config), *_instances(message, config), *_others(message))


def _scheduling(message: Any, config: ModelConfig) -> Iterator[str]:
    if not message.HasField("dynamic_batching"):
        return
    if not config.batching:
        yield "dynamic_batching has no effect: this version does not batch, so each request runs alone."
    elif message.dynamic_batching.preserve_ordering:
        yield (
            "preserve_ordering: batches start in order, and replies on one connection arrive in the order of its "
            "requests; between connections no order is guaranteed."
        )


def _instances(message: Any, config: ModelConfig) -> Iterator[str]:
    groups = message.instance_group
    if config.instances_max:
        yield (
            f"instance_group: a worker loads one instance, so at most {config.instances_max} workers of "
            f"{pools_text(config.pools) if config.pools else 'each pool'} load this version."
        )
    if any(group.gpus for group in groups):
        yield "instance_group: gpus is not used; MILLSTREAM_WORKER_DEVICE sets the device of a pool's workers."
    if any(group.kind == 3 for group in groups):
        yield "instance_group: KIND_MODEL is served by all pools that can run the model."
    for field in ("rate_limiter", "profile", "host_policy", "secondary_devices"):
        if any(_is_set(group, field) for group in groups):
            yield f"instance_group: {field} is not used."


def _others(message: Any) -> Iterator[str]:
    for name in sorted(message.parameters):
        if name in _PARAMETERS:
            yield f"parameter {name} is not used: {_PARAMETERS[name]}."
        elif name.startswith("session."):
            yield f"parameter {name[:80]} is not used: the server sets the session options."
    if message.response_cache.enable:
        yield "response_cache is not used: every request runs."
    accelerators = message.optimization.execution_accelerators
    if accelerators.gpu_execution_accelerator or accelerators.cpu_execution_accelerator:
        yield "execution_accelerators are not used: a pool called tensorrt runs on TensorRT."
    for field in ("graph", "cuda"):
        if message.optimization.HasField(field):
            yield f"optimization.{field} is not used: ONNX Runtime always applies all optimizations."
    for field in ("cc_model_filenames", "model_metrics", "runtime"):
        if _is_set(message, field):
            yield f"{field} is not used."


def _is_set(message: Any, name: str) -> bool:
    return any(field.name == name for field, _ in message.ListFields())
