"""Refuses fields of a configuration that change a model's answers and are not supported; notes those that are ignored.

Ignored fields are stored and returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from millstream.services.errors import invalid
from millstream.services.model.formats import BACKEND, ENSEMBLE, PLATFORM, format_of_platform
from millstream.services.model.manifest import ModelConfig
from millstream.services.placement.pools import pools_text
from millstream.services.plugin.registry import is_on

#: Triton's own platforms of PyTorch are TorchScript (pytorch_libtorch) and machine code of AOTInductor (torch_aoti).
TORCH_PLATFORM, TORCH_BACKEND = "torch_export", "pytorch"
#: of model.py, whose class is TritonPythonModel
PYTHON_BACKEND = "python"
_ENVIRONMENT = "EXECUTION_ENV_PATH"
#: What a file is, its content says.
_PLATFORMS = frozenset({"", PLATFORM, TORCH_PLATFORM, "torch_aoti", "pytorch_libtorch"})
_BACKENDS = frozenset({"", BACKEND, TORCH_BACKEND})
#: reasons of one refusal; further ones are counted
REASONS_MAX = 16


def refuse(reasons: Sequence[str]) -> None:
    """Raise Failure(INVALID) with all reasons, if there are any; several are numbered."""
    if len(reasons) > REASONS_MAX:
        reasons = [*reasons[:REASONS_MAX], f"and {len(reasons) - REASONS_MAX} more"]
    if len(reasons) == 1:
        raise invalid(reasons[0])
    if reasons:
        numbered = "; ".join(f"({number}) {reason}" for number, reason in enumerate(reasons, 1))
        raise invalid(f"the configuration asks for {len(reasons)} things that cannot be served: {numbered}")


def unsupported(message: Any) -> list[str]:
    """Return why each field that is not supported is not."""
    return [*_kinds(message), *_scheduling(message), *_tensors(message), *_libraries(message)]


def _kinds(message: Any) -> Iterator[str]:
    ensemble = message.platform == ENSEMBLE or message.WhichOneof("scheduling_choice") == "ensemble_scheduling"
    if ensemble:
        if format_of_platform(ENSEMBLE) is None:
            yield "ensembles are not supported without the plug-in graphs: call the models one after the other"
        return
    if message.platform not in _PLATFORMS:
        yield f"platform {message.platform[:80]!r} is not supported: only {PLATFORM} and {TORCH_PLATFORM} are"
    if message.backend == PYTHON_BACKEND:
        if not is_on("functions"):
            yield "backend 'python' is not supported without the plug-in functions"
        if _ENVIRONMENT in message.parameters:
            yield (
                f"parameter {_ENVIRONMENT} is not supported: a packed environment is not unpacked; name the packages "
                "in a requirements.txt beside model.py, or in its block '# /// script' (PEP 723)"
            )
    elif message.backend not in _BACKENDS:
        known = ", ".join(filter(None, sorted({*_BACKENDS, PYTHON_BACKEND})))
        yield f"backend {message.backend[:80]!r} is not supported: only {known} are"


def _scheduling(message: Any) -> Iterator[str]:
    if message.WhichOneof("scheduling_choice") == "sequence_batching":
        yield "sequence_batching is not supported: requests are independent of each other"
    if message.model_transaction_policy.decoupled:
        yield "model_transaction_policy.decoupled is not supported: a request has exactly one response"
    if any(group.passive for group in message.instance_group):
        yield "instance_group: passive is not supported: such an instance serves no requests"


def _tensors(message: Any) -> Iterator[str]:
    for entry in message.input:
        if entry.allow_ragged_batch:
            yield f"input {entry.name[:80]!r}: allow_ragged_batch is not supported: only equal shapes share a run"
    for field, what in (
        ("batch_input", "models receive only the inputs of requests"),
        ("batch_output", "outputs have a row for each row of the inputs"),
    ):
        if len(getattr(message, field)):
            yield f"{field} is not supported: {what}"


def _libraries(message: Any) -> Iterator[str]:
    if message.model_operations.op_library_filename:
        yield "model_operations is not supported: operator libraries are not loaded"
    if message.model_repository_agents.agents:
        yield "model_repository_agents are not supported: remove them, or apply them before the upload"


#: `parameters` of Triton's ONNX Runtime backend, and what this server does instead
_THREADS = "the option threads of a pool (`--pool cpu=1,threads=4`) sets those of its workers"
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
    return (*_scheduling_notes(message, config), *_instances_notes(message, config), *_others_notes(message))


def _scheduling_notes(message: Any, config: ModelConfig) -> Iterator[str]:
    if not message.HasField("dynamic_batching"):
        return
    if not config.batching:
        yield "dynamic_batching has no effect: this version does not batch, so each request runs alone."
    elif message.dynamic_batching.preserve_ordering:
        yield (
            "preserve_ordering: batches start in order, and replies on one connection arrive in the order of its "
            "requests; between connections no order is guaranteed."
        )


def _instances_notes(message: Any, config: ModelConfig) -> Iterator[str]:
    groups = message.instance_group
    if config.instances_max:
        yield (
            f"instance_group: a worker loads one instance, so at most {config.instances_max} workers of "
            f"{pools_text(config.pools) if config.pools else 'each pool'} load this version."
        )
    if any(group.gpus for group in groups):
        yield "instance_group: gpus is not used; the option device of a pool sets the device of its workers."
    if any(group.kind == 3 for group in groups):
        yield "instance_group: KIND_MODEL is served by all pools that can run the model."
    for field in ("rate_limiter", "profile", "host_policy", "secondary_devices"):
        if any(_is_set(group, field) for group in groups):
            yield f"instance_group: {field} is not used."


def _others_notes(message: Any) -> Iterator[str]:
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
