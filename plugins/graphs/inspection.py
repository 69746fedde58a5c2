"""Inspects the file of a graph, in the sandbox of the check: what it says must be a graph by itself.

text ─> Graph ─> references, conditions, cycles ─> compiled/graph.json
`merge`: once more, with a file for each step ─> joined under new names ─> runs of both in turns ─> the check of ONNX

Which versions its steps run, and whether their types and shapes fit, only the gateway knows (gateway/composer.py).
Imported by the checker process only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
from onnx import helper

from millstream.plugins.graphs.document import STEPS, Graph, reference
from millstream.plugins.graphs.forms import FORMAT, read_graph
from millstream.plugins.graphs.structure import Structure
from millstream.services.errors import invalid
from millstream.services.ingest.graph import read_model, save_model, stored_outside
from millstream.services.ingest.inspection import inspect as inspect_onnx
from millstream.services.ingest.model_io import ModelTensor, read_tensors
from millstream.services.ingest.report import COMPILED, CheckedModel, CheckTask
from millstream.services.ingest.trial_session import Session, TrialError
from millstream.services.model.agreement import disagreeing_rows
from millstream.services.model.datatypes import BYTES, NUMPY
from millstream.services.model.manifest import Batching
from millstream.services.model.signature import Signature
from millstream.services.model.warmup_inputs import VARIABLE_SIZES

Array = np.ndarray[Any, Any]

#: A run of the one model may take this many times what those of the steps take, which pay for a call each.
SLOWER_MAX = 1.05
_ROWS = (3, 1)  # of the runs that are compared; the last are timed
_TURNS, _TURN_S = 7, 0.02
_SEED = 6


def inspect(task: CheckTask, path: Path) -> CheckedModel:
    """Check the graph at `path`. Its signature is empty, unless it becomes one model. Raises Failure(INVALID)."""
    graph = read_graph(path)
    if task.imported is not None:
        return _one_model(task, graph)
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


def _one_model(task: CheckTask, graph: Graph) -> CheckedModel:
    """Return the one model of a graph, checked. Raises Failure(INVALID) with why its steps stay apart."""
    structure = Structure(graph)
    files = {name: task.folder / STEPS / f"{name}.onnx" for name in graph.steps}
    models = {name: read_model(path) for name, path in files.items()}
    steps = _Steps(structure, files, models)
    merged = _merged(structure, models)
    path = save_model(merged, [], task.folder, task.folder / COMPILED / "steps")
    whole = Session(path, *read_tensors(merged))
    timed = _compared(steps, whole, *read_tensors(merged))
    steps_s, whole_s = _seconds(lambda: steps.run(timed), lambda: whole.run([*timed.values()]))
    if whole_s > SLOWER_MAX * steps_s:
        raise invalid(f"a run of one model takes {1000 * whole_s:.3g} ms, and those of its steps {1000 * steps_s:.3g}")
    batching = graph.batching if task.batching is None else task.batching  # as in the composer
    checked = inspect_onnx(task.model_copy(update={"imported": None, "batching": batching}), path)
    note = (
        f"One model of {len(files)} steps: its run took {1000 * whole_s:.3g} ms in the check, and theirs "
        f"{1000 * steps_s:.3g} ms, without their calls."
    )
    return checked.model_copy(update={"notes": (note, *checked.notes)})


def _merged(structure: Structure, models: Mapping[str, onnx.ModelProto]) -> onnx.ModelProto:
    graph = structure.graph
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []
    sparse: list[onnx.SparseTensorProto] = []
    inputs: dict[str, onnx.ValueInfoProto] = {}
    made: dict[str, onnx.ValueInfoProto] = {}  # outputs of steps, by their new names
    opsets: dict[str, tuple[str, int]] = {}  # by domain: the first step that has it, the version
    for name in structure.order:
        model, step = models[name], graph.steps[name]
        if any(True for _ in stored_outside(model)):
            raise invalid(f"step '{name}': its model has weights in files of their own")
        if model.functions:
            raise invalid(f"step '{name}': its model has functions of its own")
        for entry in model.opset_import:
            first, version = opsets.setdefault(entry.domain, (name, entry.version))
            if version != entry.version:
                domain = entry.domain or "ai.onnx"
                raise invalid(
                    f"step '{name}' has operators of {domain} {entry.version}, and step '{first}' of {version}: export "
                    "both with one opset"
                )
        part = _prefixed(model.graph, _prefix(name), {})
        taken = {_prefix(name) + tensor for tensor in step.inputs}
        for value in part.input:
            if value.name not in taken:
                continue
            (source,) = step.inputs[value.name.removeprefix(_prefix(name))]
            found = reference(source, graph.steps)
            if found.step is None:
                inputs.setdefault(found.tensor, _renamed(value, found.tensor))
            given = found.tensor if found.step is None else _prefix(found.step) + found.tensor
            nodes.append(helper.make_node("Identity", [given], [value.name], f"{value.name}:given"))
        nodes += part.node
        weights += [one for one in part.initializer if one.name not in taken]
        sparse += part.sparse_initializer
        made |= {value.name: value for value in part.output}
    outputs = []
    for output, (source,) in graph.outputs.items():
        found = reference(source, graph.steps)
        assert found.step is not None
        given = _prefix(found.step) + found.tensor
        outputs.append(_renamed(made[given], output))
        nodes.append(helper.make_node("Identity", [given], [output], f"{output}:answer"))
    ordered = [inputs[name] for name in structure.inputs]
    whole = helper.make_graph(nodes, "graph", ordered, outputs, weights, sparse_initializer=sparse)
    imports = [helper.make_opsetid(domain, version) for domain, (_, version) in opsets.items()]
    version = max(model.ir_version for model in models.values())
    return helper.make_model(whole, opset_imports=imports, ir_version=version, producer_name="Millstream")


def _prefix(step: str) -> str:
    return f"{step}/"


def _prefixed(graph: onnx.GraphProto, prefix: str, outer: Mapping[str, str]) -> onnx.GraphProto:
    """Return a graph with other names, in the graphs of its nodes, too. `outer`: those of the graphs around it."""
    new = onnx.GraphProto()
    new.CopyFrom(graph)
    del new.value_info[:]
    values = [*new.input, *new.initializer, *(one.values for one in new.sparse_initializer)]
    defined = [*(value.name for value in values), *(name for node in new.node for name in node.output)]
    names = {**outer, **{name: prefix + name for name in defined if name}}
    for value in (*values, *new.output):
        value.name = names[value.name]
    for node in new.node:
        node.name = prefix + (node.name or node.op_type)
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            inner = [attribute.g] if attribute.HasField("g") else attribute.graphs
            for one in inner:
                one.CopyFrom(_prefixed(one, prefix, names))
    return new


def _renamed(value: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    """Return the tensor under another name. Its variable dimensions have none: those of steps say different things."""
    renamed = onnx.ValueInfoProto()
    renamed.CopyFrom(value)
    renamed.name = name
    for number, dim in enumerate(renamed.type.tensor_type.shape.dim):
        if not dim.HasField("dim_value"):
            dim.dim_param = "rows" if not number else f"{name}:{number}"
    return renamed


class _Steps:
    """The models of the steps, which run one after the other."""

    def __init__(self, structure: Structure, files: Mapping[str, Path], models: Mapping[str, onnx.ModelProto]) -> None:
        self._graph, self._order = structure.graph, structure.order
        self._tensors = {name: read_tensors(model) for name, model in models.items()}
        for name, (inputs, _) in self._tensors.items():
            known = {tensor.name for tensor in inputs}
            for tensor in self._graph.steps[name].inputs:
                if tensor not in known:
                    raise invalid(f"step '{name}': its input '{tensor}' has a stored value")
        self._sessions = {name: Session(path, *self._tensors[name]) for name, path in files.items()}

    def run(self, given: Mapping[str, Array]) -> list[Array]:
        """Return the outputs of the graph for its inputs. Raises TrialError."""
        values: dict[tuple[str | None, str], Array] = {(None, name): array for name, array in given.items()}
        for name in self._order:
            step, (inputs, outputs) = self._graph.steps[name], self._tensors[name]
            sources = [reference(step.inputs[tensor.name][0], self._graph.steps) for tensor in inputs]
            answered = self._sessions[name].run([values[source.step, source.tensor] for source in sources])
            values |= {(name, tensor.name): array for tensor, array in zip(outputs, answered, strict=True)}
        found = [reference(source, self._graph.steps) for (source,) in self._graph.outputs.values()]
        return [values[source.step, source.tensor] for source in found]


def _compared(steps: _Steps, whole: Session, inputs: list[ModelTensor], outputs: list[ModelTensor]) -> dict[str, Array]:
    """Return inputs of one row on which the steps and the one model agree. Raises Failure(INVALID)."""
    size, first = _size(steps, inputs)
    for rows in _ROWS:
        for given in [_drawn(inputs, rows, size), *([first] if rows == 1 else [])]:
            try:
                expected = steps.run(given)
            except TrialError:  # rows may be fixed, and numbers that were drawn no indices of the model
                continue
            try:
                actual = whole.run([*given.values()])
            except TrialError as error:
                raise invalid(f"one model fails where its steps answer: {error}") from error
            for tensor, one, other in zip(outputs, expected, actual, strict=True):
                if disagreeing_rows(tensor.datatype, np.atleast_1d(other), np.atleast_1d(one)):
                    raise invalid(f"one model answers something else in '{tensor.name}' than its steps do")
    return first


def _size(steps: _Steps, inputs: list[ModelTensor]) -> tuple[int, dict[str, Array]]:
    """Return a size of variable dimensions with which the steps run, and inputs of one row of that size."""
    why = ""
    for size in VARIABLE_SIZES:
        for given in (_drawn(inputs, 1, size), _drawn(inputs, 1, size, zeros=True)):
            try:
                steps.run(given)
            except TrialError as error:
                why = str(error)
            else:
                return size, given
    raise invalid(f"no generated input runs through all steps: {why}")


def _drawn(inputs: list[ModelTensor], rows: int, size: int, *, zeros: bool = False) -> dict[str, Array]:
    random = np.random.default_rng(_SEED)
    return {tensor.name: _array(random, tensor, rows, size, zeros=zeros) for tensor in inputs}


def _array(random: np.random.Generator, tensor: ModelTensor, rows: int, size: int, *, zeros: bool) -> Array:
    shape = [dim if isinstance(dim, int) else size if number else rows for number, dim in enumerate(tensor.dims)]
    if tensor.datatype == BYTES:
        return np.full(shape, "0")
    dtype = np.dtype(NUMPY[tensor.datatype])
    if zeros or tensor.datatype == "BF16":
        return np.zeros(shape, dtype)
    return (random.standard_normal(shape) if dtype.kind == "f" else random.integers(0, 2, shape)).astype(dtype)


def _seconds(*runs: Callable[[], object]) -> Iterator[float]:
    """Yield the median seconds of each run, measured in turns."""
    took: list[list[float]] = [[] for _ in runs]
    for _ in range(_TURNS):
        for run, found in zip(runs, took, strict=True):
            count, began = 0, time.perf_counter()
            while not count or time.perf_counter() - began < _TURN_S:
                run()
                count += 1
            found.append((time.perf_counter() - began) / count)
    yield from map(median, took)
