"""What proves that the rows of a model do not influence each other, which a plug-in adds.

Without one nothing is proven: requests then share runs where a configuration asks for it and trials agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from millstream.services.plugin.registry import contributions

if TYPE_CHECKING:
    import onnx


class Proof(NamedTuple):
    """Whether rows are proven independent; if not, the operator that ends the proof, and the reason."""

    proven: bool
    culprit: str
    reason: str


@runtime_checkable
class Prover(Protocol):
    """Analyses graphs of ONNX."""

    def prove(self, model: onnx.ModelProto, names: Sequence[str]) -> Proof:
        """Return whether the rows of the inputs of these names are independent."""

    def with_variable_rows(self, model: onnx.ModelProto, folder: Path) -> onnx.ModelProto | None:
        """Return a copy with a variable first dimension in every input and output; None: it cannot.

        `folder`: that of its weight files.
        """

    def with_equal_sizes(self, model: onnx.ModelProto) -> onnx.ModelProto | None:
        """Return a copy that fails for inputs whose dimensions of one name differ; None: there is none."""


class _NoProver:
    def prove(self, model: onnx.ModelProto, names: Sequence[str]) -> Proof:
        return Proof(False, "the graph", "no plug-in is there that analyses it")

    def with_variable_rows(self, model: onnx.ModelProto, folder: Path) -> onnx.ModelProto | None:
        return None

    def with_equal_sizes(self, model: onnx.ModelProto) -> onnx.ModelProto | None:
        return None


def prover() -> Prover:
    """Return what proves."""
    return next(iter(contributions("provers", Prover)), _NoProver())  # type: ignore[type-abstract]
