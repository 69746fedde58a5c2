"""version_policy: which of a model's versions are served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.errors import invalid


def chosen(message: Any, versions: Sequence[int]) -> tuple[int, ...]:
    """Those of `versions` that the policy serves, ascending; without one the highest alone.

    Raises Failure(INVALID): none is left, or one that is named is not there.
    """
    if not versions:
        raise invalid("there is no version: a folder named 1, 2, … with the model file in it")
    policy = message.version_policy
    kind = policy.WhichOneof("policy_choice")
    if kind == "all":
        return tuple(sorted(versions))
    if kind == "specific":
        return _specific(policy.specific.versions, versions)
    number = policy.latest.num_versions if kind == "latest" else 1
    return tuple(sorted(versions)[-max(1, number) :])


def _specific(named: Sequence[int], versions: Sequence[int]) -> tuple[int, ...]:
    missing = sorted(set(named) - set(versions))
    if missing:
        raise invalid(f"version_policy names version {missing[0]}, which is not there")
    if not named:
        raise invalid("version_policy: specific names no version")
    return tuple(sorted(set(named)))
