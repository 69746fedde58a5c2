"""Rejects fields of a model configuration that this server does not support and that change a model's answers.

Fields that can be ignored without harm become notes instead (triton_config.ignored_fields).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from millstream.services.errors import invalid
from millstream.services.model.formats import BACKEND, PLATFORM

#: Triton's own platforms of PyTorch are TorchScript (pytorch_libtorch) and machine code of AOTInductor (torch_aoti).
TORCH_PLATFORM, TORCH_BACKEND = "torch_export", "pytorch"
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
    ensemble = message.platform == "ensemble" or message.WhichOneof("scheduling_choice") == "ensemble_scheduling"
    if ensemble:
        yield "ensembles are not supported: call the models one after the other, or export them as one model"
    elif message.platform not in _PLATFORMS:
        yield f"platform {message.platform[:80]!r} is not supported: only {PLATFORM} and {TORCH_PLATFORM} are"
    if message.backend not in _BACKENDS:
        yield f"backend {message.backend[:80]!r} is not supported: only {BACKEND} and {TORCH_BACKEND} are"


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
