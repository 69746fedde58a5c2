"""Applies version_policy: selects the versions of a model to serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.services.errors import invalid


def served_versions(message: Any, versions: Sequence[int]) -> tuple[int, ...]:
    """Return the versions that the policy serves, ascending; without a policy only the highest.

    Like Triton, skips versions that the policy names but that do not exist.

    Raises:
        Failure: INVALID, if no version is left.
    """
    if not versions:
        raise invalid("the model has no version: add a folder named 1, 2, … that contains the model file")
    policy = message.version_policy
    kind = policy.WhichOneof("policy_choice")
    if kind == "all":
        return tuple(sorted(versions))
    if kind == "specific":
        return _specific(policy.specific.versions, versions)
    number = policy.latest.num_versions if kind == "latest" else 1
    return tuple(sorted(versions)[-max(1, number) :])


def _specific(named: Sequence[int], versions: Sequence[int]) -> tuple[int, ...]:
    if not named:
        raise invalid("version_policy: specific names no version")
    existing = sorted(set(named) & set(versions))
    if not existing:
        missing = ", ".join(map(str, sorted(set(named))[:5]))
        raise invalid(f"version_policy names {missing}, but the model has no such version")
    return tuple(existing)
