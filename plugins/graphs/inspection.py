"""Inspects the file of a graph, in the sandbox of the check: what it says must be a graph by itself.

text ─> Graph ─> references, conditions, cycles ─> compiled/graph.json

Which versions its steps run, and whether their types and shapes fit, only the gateway knows (gateway/composer.py).
"""

from __future__ import annotations

from pathlib import Path

from millstream.plugins.graphs.forms import FORMAT, read_graph
from millstream.plugins.graphs.structure import Structure
from millstream.services.ingest.report import COMPILED, CheckedModel, CheckTask
from millstream.services.model.manifest import Batching
from millstream.services.model.signature import Signature


def inspect(task: CheckTask, path: Path) -> CheckedModel:
    """Check the graph at `path`. Its signature has nothing yet. Raises Failure(INVALID)."""
    graph = read_graph(path)
    if not graph.routes:  # what its steps take follows from their versions
        Structure(graph)
    source = str(path.relative_to(task.folder))
    served = source
    if task.served is None:
        served = f"{COMPILED}/graph.json"
        (task.folder / COMPILED).mkdir(exist_ok=True)
        (task.folder / served).write_text(graph.model_dump_json(by_alias=True, exclude_defaults=True))
    return CheckedModel(
        served=served,
        files=(served,),
        sources=(source,),
        signature=Signature(inputs=(), outputs=(), batching=False),
        opset=0,
        ir_version=0,
        producer="",
        batching=Batching(),
        notes=(),
        source_format=FORMAT,
    )
