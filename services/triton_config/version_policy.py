"""version_policy: which of a model's versions are served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.services.errors import invalid


def chosen(message: Any, versions: Sequence[int]) -> tuple[int, ...]:
    """Those of `versions` that the policy serves, ascending; without one the highest alone.

    Versions that the policy names and that are not there are left out, as by Triton.

    Raises:
        Failure: INVALID when none is left.
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
    if not named:
        raise invalid("version_policy: specific names no version")
    there = sorted(set(named) & set(versions))
    if not there:
        shown = ", ".join(map(str, sorted(set(named))[:5]))
        raise invalid(f"version_policy names {shown}, and there is no such version")
    return tuple(there)
