"""Rejects fields of a model configuration that this server does not support and that change a model's answers.

Fields that can be ignored without harm become notes instead (triton_config.ignored_fields).
"""

from __future__ import annotations

from typing import Any

from millstream.services.errors import invalid
from millstream.services.model.platforms import BACKEND, PLATFORM, TORCH_BACKEND, TORCH_PLATFORM

#: What a file is, its content says.
_PLATFORMS = frozenset({"", PLATFORM, TORCH_PLATFORM, "torch_aoti", "pytorch_libtorch"})
_BACKENDS = frozenset({"", BACKEND, TORCH_BACKEND})


def check_supported(message: Any) -> None:
    """Raise Failure(INVALID) for the first field that is not supported."""
    _check_kind(message)
    scheduling = message.WhichOneof("scheduling_choice")
    if scheduling == "sequence_batching":
        raise invalid("sequence_batching is not supported: requests are independent of each other")
    if message.model_transaction_policy.decoupled:
        raise invalid("model_transaction_policy.decoupled is not supported: a request has exactly one response")
    for entry in message.input:
        if entry.allow_ragged_batch:
            raise invalid(f"input {entry.name!r}: allow_ragged_batch is not supported: only equal shapes share a run")
    for field, what in (
        ("batch_input", "models receive only the inputs of requests"),
        ("batch_output", "outputs have a row for each row of the inputs"),
    ):
        if len(getattr(message, field)):
            raise invalid(f"{field} is not supported: {what}")
    if message.model_operations.op_library_filename:
        raise invalid("model_operations is not supported: operator libraries are not loaded")
    if message.model_repository_agents.agents:
        raise invalid("model_repository_agents are not supported: remove them, or apply them before the upload")


def _check_kind(message: Any) -> None:
    if message.platform == "ensemble" or message.WhichOneof("scheduling_choice") == "ensemble_scheduling":
        raise invalid("ensembles are not supported: call the models one after the other, or export them as one model")
    if message.platform not in _PLATFORMS:
        raise invalid(f"platform {message.platform[:80]!r} is not supported: only {PLATFORM} and {TORCH_PLATFORM} are")
    if message.backend not in _BACKENDS:
        raise invalid(f"backend {message.backend[:80]!r} is not supported: only {BACKEND} and {TORCH_BACKEND} are")
