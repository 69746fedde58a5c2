"""One check of a model of our own, before any other, in the process that checkers are forked from.

A child then finds done what each first check does: code that was never run, caches, allocations, symbols that the
linker looks up when they are first called. Without it, checking a small model takes a quarter longer.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import onnx.parser

from millstream.services.ingest.importers import resolve
from millstream.services.ingest.inspection import inspect
from millstream.services.ingest.report import CheckTask

_BYTES_MAX = 1 << 30  # for limits that a few numbers do not reach
_MODEL = """
<ir_version: 8, opset_import: ["": 17]>
rehearsal (float[N, 2] x) => (float[N, 2] y) <float[2, 2] weights = {0.5, -0.25, 0.125, 1.0}>
{
   product = MatMul(x, weights)
   y = Relu(product)
}
"""


def rehearse() -> None:
    """Check a small model in this process. Nothing stays of it; the model and its session are gone on return."""
    resolve()
    with TemporaryDirectory(prefix="millstream-") as name:
        path = Path(name, "model.onnx")
        path.write_bytes(onnx.parser.parse_model(_MODEL).SerializeToString())
        task = CheckTask(
            folder=path.parent,
            batching=None,
            unpacked_bytes_max=_BYTES_MAX,
            memory_bytes_max=_BYTES_MAX,
            cpu_s_max=1,
            served=path.name,
        )
        inspect(task, path)
