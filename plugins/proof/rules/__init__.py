"""The rules: how each operator treats rows. One module for each family of operators."""

from __future__ import annotations

from millstream.plugins.proof.node import Rules
from millstream.plugins.proof.rules import (
    attention,
    convolution,
    elementwise,
    layout,
    machine_learning,
    matrix,
    microsoft,
    normalization,
    quantization,
    recurrent,
    reduction,
    row_mixing,
    selection,
)

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
        **recurrent.RULES,
        **attention.RULES,
        **quantization.RULES,
        **machine_learning.TEXT_RULES,
        **row_mixing.RULES,
    },
    "ai.onnx.ml": machine_learning.RULES,
    "com.microsoft": microsoft.RULES,
}
