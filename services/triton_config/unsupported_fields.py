"""What a model configuration may ask for and this server does not do. Ignoring it would give wrong answers: it is refused.

What can be ignored without harm becomes a note instead (millstream.services.triton_config.to_model_config).
"""

from __future__ import annotations

from typing import Any

from millstream.services.errors import invalid

PLATFORM, BACKEND = "onnxruntime_onnx", "onnxruntime"


def check_supported(message: Any) -> None:
    """Raises Failure(INVALID) with one line for the first thing that is not done here."""
    _check_kind(message)
    scheduling = message.WhichOneof("scheduling_choice")
    if scheduling == "sequence_batching":
        raise invalid("sequence_batching is not supported: requests of a model are independent of each other here")
    if message.model_transaction_policy.decoupled:
        raise invalid("model_transaction_policy.decoupled is not supported: a request has exactly one response")
    for one in message.input:
        if one.allow_ragged_batch:
            raise invalid(f"input {one.name!r}: allow_ragged_batch is not supported: requests of one shape share a run")
    for field, what in (
        ("batch_input", "models get their own inputs alone"),
        ("batch_output", "outputs have a row for each row of the inputs"),
    ):
        if len(getattr(message, field)):
            raise invalid(f"{field} is not supported: {what}")
    if message.model_operations.op_library_filename:
        raise invalid("model_operations is not supported: no code is loaded with a model")
    if message.model_repository_agents.agents:
        raise invalid("model_repository_agents are not supported: what they would check or change is not done")


def _check_kind(message: Any) -> None:
    if message.platform == "ensemble" or message.WhichOneof("scheduling_choice") == "ensemble_scheduling":
        raise invalid("ensembles are not supported: call the models one after the other, or export them as one")
    if message.platform not in {"", PLATFORM}:
        raise invalid(f"platform {message.platform[:80]!r} is not supported: only {PLATFORM} is")
    if message.backend not in {"", BACKEND}:
        raise invalid(f"backend {message.backend[:80]!r} is not supported: only {BACKEND} is")
