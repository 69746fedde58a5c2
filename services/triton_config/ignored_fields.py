"""What a configuration says that changes nothing here, one sentence each: kept, served back, and told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millstream.services.model.manifest import ModelConfig

#: `parameters` that ONNX Runtime's backend of Triton knows, and what is done here instead
_THREADS = "each worker has the threads that `millstream up --worker-threads` gives it"
_PARAMETERS = {
    "intra_op_thread_count": _THREADS,
    "inter_op_thread_count": _THREADS,
    "execution_mode": "operators run one after the other",
    "enable_mem_arena": "no arena is used",
    "enable_mem_pattern": "patterns are used where all shapes are fixed",
    "memory.enable_memory_arena_shrinkage": "no arena is used",
}


def notes_of(message: Any, config: ModelConfig) -> tuple[str, ...]:
    """Notes for the version's document."""
    return (*_scheduling(message, config), *_instances(message, config), *_others(message))


def _scheduling(message: Any, config: ModelConfig) -> Iterator[str]:
    if not message.HasField("dynamic_batching"):
        return
    if not config.batching:
        yield "dynamic_batching changes nothing: requests of a version that does not batch run alone."
    elif message.dynamic_batching.preserve_ordering:
        yield (
            "preserve_ordering: batches start in order, and replies on one connection come in the order of its "
            "requests; between connections there is no order."
        )


def _instances(message: Any, config: ModelConfig) -> Iterator[str]:
    groups = message.instance_group
    if config.instances_max:
        yield (
            f"instance_group: a worker holds one instance, so at most {config.instances_max} workers of pool "
            f"{config.pool!r} hold this version."
        )
    if any(group.gpus for group in groups):
        yield "instance_group: gpus is not used; MILLSTREAM_WORKER_DEVICE of a pool's workers names their device."
    if any(group.kind == 3 for group in groups):
        yield f"instance_group: KIND_MODEL is served by pool {config.pool!r}."
    for field in ("rate_limiter", "profile", "host_policy", "secondary_devices"):
        if any(_is_set(group, field) for group in groups):
            yield f"instance_group: {field} is not used."


def _others(message: Any) -> Iterator[str]:
    for name in sorted(message.parameters):
        if name in _PARAMETERS:
            yield f"parameter {name} is not used: {_PARAMETERS[name]}."
        elif name.startswith("session."):
            yield f"parameter {name[:80]} is not used: sessions are set up by the server."
    if message.response_cache.enable:
        yield "response_cache is not used: every request runs."
    accelerators = message.optimization.execution_accelerators
    if accelerators.gpu_execution_accelerator or accelerators.cpu_execution_accelerator:
        yield "execution_accelerators are not used: a pool called tensorrt runs on TensorRT."
    for field in ("graph", "cuda"):
        if message.optimization.HasField(field):
            yield f"optimization.{field} is not used: ONNX Runtime optimises all it can."
    for field in ("cc_model_filenames", "model_metrics", "runtime"):
        if _is_set(message, field):
            yield f"{field} is not used."


def _is_set(message: Any, name: str) -> bool:
    return any(field.name == name for field, _ in message.ListFields())
