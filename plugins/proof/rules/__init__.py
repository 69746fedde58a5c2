"""The rules: how each operator treats rows. One module for each family of operators."""

from __future__ import annotations

from millstream.plugins.proof.node import Rule, Rules, always_dependent
from millstream.plugins.proof.rules import (
    convolution,
    elementwise,
    layout,
    machine_learning,
    matrix,
    microsoft,
    normalization,
    quantization,
    reduction,
    selection,
    sequences,
)

RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)

#: Operators that always mix rows, and the reason for each, which is more helpful than "not known".
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
_ROW_MIXING: Rules = {
    **{op: Rule(always_dependent(reason)) for op, reason in _REASONS.items()},
    **{op: Rule(always_dependent("its output is random")) for op in RANDOM},
}

#: domain -> operator -> rule; operators of other domains are unknown
RULES: dict[str, Rules] = {
    "": {
        **elementwise.RULES,
        **matrix.RULES,
        **convolution.RULES,
        **normalization.RULES,
        **reduction.RULES,
        **layout.RULES,
        **selection.RULES,
        **sequences.RULES,
        **quantization.RULES,
        **machine_learning.TEXT_RULES,
        **_ROW_MIXING,
    },
    "ai.onnx.ml": machine_learning.RULES,
    "com.microsoft": microsoft.RULES,
}
