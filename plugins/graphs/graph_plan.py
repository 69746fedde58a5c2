"""A graph whose steps' signatures are known: its own signature, and the plan by which a gateway runs it. Pure.

Structure, signatures of the steps' versions ─> every input's type and shape checked ─> GraphPlan

Each tensor of a graph has a number, its slot: first the inputs of the graph, then the outputs of its steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from millstream.plugins.graphs.conditions import Condition
from millstream.plugins.graphs.document import DeclaredTensor, Step, reference
from millstream.plugins.graphs.structure import Structure
from millstream.services.errors import invalid
from millstream.services.model.manifest import VersionPart
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.nearest_names import did_you_mean

Shape = tuple[int, ...]


@dataclass(slots=True)
class PlannedStep:
    """One step.

    Args:
        part: the version that it runs.
        inputs: slots of each input in the signature's order, of which the first that was made counts; (): left out.
        needed: of each input, whether the step cannot run without it.
        outputs: slots of the outputs, in the signature's order.
        condition: and the slots that it reads, by name.
        after: the steps that wait for this one.
    """

    part: VersionPart
    inputs: tuple[tuple[int, ...], ...]
    needed: tuple[bool, ...]
    outputs: range
    condition: Condition | None
    reads: Mapping[str, int]
    after: list[int] = field(default_factory=list)

    def slots(self) -> Iterator[int]:
        """Yield the slots that the step waits for; a slot may come twice."""
        yield from self.reads.values()
        for alternatives in self.inputs:
            yield from alternatives


class GraphPlan:
    """A graph that can run.

    `steps`: each after those that it waits for. `outputs`: slots of each output, of which the first that was made
    counts. `producers`: the step of each slot; None: it is an input. `datatypes`: of each slot. `reshapes`: whether a
    tensor of one row may lose or gain its rows between steps, as in Triton's ensembles.

    Args:
        structure: of the graph.
        parts: one for each step, in the document's order.
        signatures: that callers see, of the parts.

    Raises:
        Failure: INVALID: a tensor is missing, or a type or shape does not fit.
    """

    def __init__(self, structure: Structure, parts: Sequence[VersionPart], signatures: Sequence[Signature]) -> None:
        self._structure, graph = structure, structure.graph
        self.reshapes = graph.form == "triton"
        self._of = dict(zip(graph.steps, zip(parts, signatures, strict=True), strict=True))
        self._specs: list[TensorSpec] = []  # of each slot
        self._slots: dict[tuple[str | None, str], int] = {}
        inputs = [self._input(name) for name in structure.inputs]
        for spec in inputs:
            self._slots[None, spec.name] = len(self._specs)
            self._specs.append(spec)
        self.inputs = tuple(inputs)
        self.producers: list[int | None] = [None] * len(inputs)
        numbers = {name: number for number, name in enumerate(structure.order)}
        starts: dict[str, int] = {}
        for name in structure.order:
            starts[name] = len(self._specs)
            for spec in self._of[name][1].outputs:
                self._slots[name, spec.name] = len(self._specs)
                self._specs.append(spec)
                self.producers.append(numbers[name])
        self.steps = [self._step(name, graph.steps[name], starts[name]) for name in structure.order]
        for number, step in enumerate(self.steps):
            for producer in dict.fromkeys(self.producers[slot] for slot in step.slots()):
                if producer is not None:
                    self.steps[producer].after.append(number)
        self.outputs = tuple(
            tuple(self._slot(source, f"output '{name}'") for source in sources)
            for name, sources in graph.outputs.items()
        )
        self.datatypes = tuple(spec.datatype for spec in self._specs)
        outputs = tuple(self._output(name, slots) for name, slots in zip(graph.outputs, self.outputs, strict=True))
        self.signature = Signature(inputs=self.inputs, outputs=outputs, batching=self._batching(outputs))

    def _slot(self, source: str, where: str) -> int:
        found = reference(source, self._structure.graph.steps)
        slot = self._slots.get((found.step, found.tensor))
        if slot is None:
            assert found.step is not None  # every input of the graph has a slot
            part, signature = self._of[found.step]
            known = [spec.name for spec in signature.outputs]
            hint = did_you_mean(found.tensor, known) or f"; it has {', '.join(known[:8])}"
            raise invalid(f"{where}: '{found.tensor}' is no output of {part.label}{hint}")
        return slot

    def _step(self, name: str, step: Step, start: int) -> PlannedStep:
        part, signature = self._of[name]
        condition = self._structure.conditions.get(name)
        known = {spec.name for spec in signature.inputs}
        for given in step.inputs:
            if given not in known:
                hint = did_you_mean(given, known) or f"; it has {', '.join(sorted(known)[:8])}"
                raise invalid(f"{part.label} has no input '{given}'{hint}")
        inputs: list[tuple[int, ...]] = []
        for spec in signature.inputs:
            where = f"{part.label}, input '{spec.name}'"
            sources = step.inputs.get(spec.name, ())
            if not sources and not spec.optional:
                raise invalid(f"{where} is missing: name where it comes from")
            slots = tuple(self._slot(source, where) for source in sources)
            for slot, source in zip(slots, sources, strict=True):
                if not self.reshapes:  # else Triton's rules were checked (ensemble.py)
                    self._check(self._specs[slot], spec, source, where)
            inputs.append(slots)
        reads = (
            {} if condition is None else {one: self._slot(one, f"{part.label}, condition") for one in condition.names}
        )
        outputs = range(start, start + len(signature.outputs))
        return PlannedStep(
            part, tuple(inputs), tuple(not spec.optional for spec in signature.inputs), outputs, condition, reads
        )

    @staticmethod
    def _check(source: TensorSpec, target: TensorSpec, name: str, where: str) -> None:
        """Raise Failure(INVALID) if a source does not fit an input of a step."""
        if source.datatype != target.datatype:
            raise invalid(f"{where} takes {target.datatype}, and '{name}' is {source.datatype}")
        if _merged(source.shape, target.shape) is None:
            raise invalid(f"{where} takes the shape {list(target.shape)}, and '{name}' has {list(source.shape)}")

    def _input(self, name: str) -> TensorSpec:
        """Return the spec of an input of the graph: what all steps that read it take."""
        spec: TensorSpec | None = None
        optional = True
        first = ""
        for step_name, step in self._structure.graph.steps.items():
            part, signature = self._of[step_name]
            condition = self._structure.conditions.get(step_name)
            if condition is not None and name in condition.names:
                optional = False
            for target in signature.inputs:
                if name not in step.inputs.get(target.name, ()):
                    continue
                where = f"input '{name}' of the graph is input '{target.name}' of {part.label}"
                optional = optional and target.optional
                if spec is None:
                    spec, first = target, where
                    continue
                shape = spec.shape if self.reshapes else _merged(spec.shape, target.shape)
                if spec.datatype != target.datatype or shape is None:
                    was, now = f"{spec.datatype} {list(spec.shape)}", f"{target.datatype} {list(target.shape)}"
                    raise invalid(f"{where}, which takes {now}, and {first}, which takes {was}: they do not fit")
                spec = spec.model_copy(update={"shape": shape})
        declared = self._structure.graph.inputs.get(name)
        if spec is None:  # conditions alone read it, or inputs that no version has, which is refused with their names
            datatype, shape = (None, None) if declared is None else (declared.datatype, declared.shape)
            spec = TensorSpec(name=name, datatype=datatype or "FP32", shape=(-1,) if shape is None else shape)
        if self.reshapes and declared is not None and declared.shape is not None:
            shape = declared.shape
        else:
            shape = _declared(f"input '{name}'", spec, declared, narrows=True)
        return TensorSpec(name=name, datatype=spec.datatype, shape=shape, optional=optional)

    def _output(self, name: str, slots: Sequence[int]) -> TensorSpec:
        """Return the spec of an output of the graph: what holds for each of its sources."""
        specs = [self._specs[slot] for slot in slots]
        shape = specs[0].shape
        for spec in specs[1:]:
            if spec.datatype != specs[0].datatype or len(spec.shape) != len(shape):
                kinds = " or ".join(f"{one.datatype} {list(one.shape)}" for one in (specs[0], spec))
                raise invalid(f"output '{name}' would be {kinds}: its sources have to be of one type and rank")
            shape = tuple(a if a == b else -1 for a, b in zip(shape, spec.shape, strict=True))
        spec = TensorSpec(name=name, datatype=specs[0].datatype, shape=shape)
        declared = self._structure.graph.answers.get(name)
        if self.reshapes and declared is not None and declared.shape is not None:
            return spec.model_copy(update={"shape": declared.shape})
        return spec.model_copy(update={"shape": _declared(f"output '{name}'", spec, declared, narrows=False)})

    def _batching(self, outputs: Sequence[TensorSpec]) -> bool:
        """Whether rows of the graph are independent: if those of all steps are, unless the graph says otherwise."""
        if self.reshapes:
            return bool(self._structure.graph.batching)
        with_rows = all(spec.shape[:1] == (-1,) for spec in (*self.inputs, *outputs))
        able = with_rows and all(signature.batching for _, signature in self._of.values())
        asked = self._structure.graph.batching
        if asked and not able:
            alone = next((part.label for part, signature in self._of.values() if not signature.batching), None)
            why = f"{alone} has none: its requests run alone" if alone else "a declared shape fixes their number"
            raise invalid(f"the graph is to have rows, and {why}")
        return able if asked is None else asked

    def needed(self, outputs: Sequence[int]) -> frozenset[int]:
        """Return the steps that the outputs of these indices need."""
        todo = [step for index in outputs for slot in self.outputs[index] if (step := self.producers[slot]) is not None]
        found: set[int] = set()
        while todo:
            number = todo.pop()
            if number not in found:
                found.add(number)
                todo += [step for slot in self.steps[number].slots() if (step := self.producers[slot]) is not None]
        return frozenset(found)


def _merged(one: Shape, other: Shape) -> Shape | None:
    """Return the shape that fits both; None: none does."""
    if len(one) != len(other):
        return None
    if any(a != b and -1 not in {a, b} for a, b in zip(one, other, strict=True)):
        return None
    return tuple(max(a, b) for a, b in zip(one, other, strict=True))


def _declared(where: str, spec: TensorSpec, declared: DeclaredTensor | None, *, narrows: bool) -> Shape:
    """Return the shape of a tensor of which the graph says something. Raises Failure(INVALID) if that does not fit."""
    if declared is None:
        return spec.shape
    if declared.datatype not in {None, spec.datatype}:
        raise invalid(f"{where} of the graph is declared as {declared.datatype}, and its steps have {spec.datatype}")
    if declared.shape is None:
        return spec.shape
    merged = _merged(declared.shape, spec.shape)
    if merged is None:
        raise invalid(
            f"{where} of the graph is declared as {list(declared.shape)}, and its steps have {list(spec.shape)}"
        )
    return merged if narrows else declared.shape
