"""Operators that always mix rows, and the reason for each, which is more helpful than "not known"."""

from __future__ import annotations

from collections.abc import Callable

from millstream.plugins.proof.node import Call, Rule, Rules
from millstream.plugins.proof.value import Dependent, Value

RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)

_REASONS = {
    "Compress": "the size of its output depends on the data of all rows",
    "DynamicQuantizeLinear": "its scale is taken over all rows",
    "EyeLike": "its output depends on the position of a row in the batch",
    "MaxRoiPool": "its regions refer to positions in the whole batch",
    "MaxUnpool": "its indices are positions in the whole batch",
    "NonMaxSuppression": "the size of its output depends on the data of all rows",
    "NonZero": "the size of its output depends on the data of all rows",
    "RoiAlign": "its regions refer to positions in the whole batch",
    "StringSplit": "the size of its output depends on the data of all rows",
    "Unique": "it compares all rows with each other",
}


def always_dependent(reason: str) -> Callable[[Call], list[Value]]:
    """Return a rule that always ends the proof with `reason`."""

    def apply(_call: Call) -> list[Value]:
        raise Dependent(reason)

    return apply


RULES: Rules = {
    **{op: Rule(always_dependent(reason)) for op, reason in _REASONS.items()},
    **{op: Rule(always_dependent("its output is random")) for op in RANDOM},
}
