"""Whether the rows of a compiled ONNX model still do not influence each other.

Dynamic quantization takes its scales from the whole batch: an answer would depend on which requests share the run.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from millstream.plugins.compile.candidate import Compiled, Subject
from millstream.plugins.proof import prove
from millstream.services.model.signature import needed_inputs

#: Operators that quantize by the values of the whole batch.
_MIXING = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"})


def check_rows(compiled: Compiled, subject: Subject, folder: Path) -> Compiled:
    """Return `compiled` with `rows_independent`, and a note where it is False."""
    reason = _dependence(folder / compiled.files[0], subject)
    if not reason:
        return compiled
    note = f"rows influence each other ({reason}): for runs of one row only"
    return compiled.model_copy(update={"rows_independent": False, "notes": (*compiled.notes, note)})


def _dependence(path: Path, subject: Subject) -> str:
    """Return why rows may influence each other; empty: they do not, as far as they did not before."""
    names = [spec.name for spec in needed_inputs(subject.signature)]
    model = onnx.load(str(path), load_external_data=False)
    proof = prove(model, names)
    if proof.proven:
        return ""
    if prove(onnx.load(str(subject.path), load_external_data=False), names).proven:
        return f"{proof.culprit}: {proof.reason}"
    # Trials alone showed that the version batches, so the graph of its compiled form need not prove it.
    mixing = sorted({node.op_type for node in model.graph.node if node.op_type in _MIXING})
    return f"{mixing[0]}: it quantizes by the values of the whole batch" if mixing else ""
