"""What follows from a graph's document alone: what each step waits for, in which order they run, its inputs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from millstream.plugins.graphs.conditions import Condition, parse
from millstream.plugins.graphs.document import Graph, Reference, Step, reference
from millstream.services.errors import Failure, invalid
from millstream.services.nearest_names import did_you_mean


class Structure:
    """The structure of a graph.

    `conditions`: of the steps that have one, by name. `order`: the steps' names, each after those that it waits for.
    `inputs`: names of the graph's inputs, in their order. Raises Failure(INVALID): a source names nothing, a condition
    is not understood, steps wait for each other, or a step or input is of no use.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.conditions: dict[str, Condition] = {}
        used: dict[str, None] = dict.fromkeys(graph.inputs)
        self._waits: dict[str, dict[str, None]] = {}
        for name, step in graph.steps.items():
            found = list(self._references(name, step))
            self._waits[name] = dict.fromkeys(one.step for one in found if one.step is not None)
            used |= dict.fromkeys(one.tensor for one in found if one.step is None)
        self.inputs = tuple(used)
        for name, sources in graph.outputs.items():
            for source in sources:
                if reference(source, graph.steps).step is None:
                    raise invalid(f"output '{name}': {self._no_step(source)}")
        self.order = tuple(self._ordered())
        self._check_use()

    def _references(self, name: str, step: Step) -> Iterator[Reference]:
        """Yield what a step reads. Raises Failure(INVALID) that names the step."""
        where = f"step '{name}'"
        if step.condition:
            try:
                self.conditions[name] = parse(step.condition)
            except Failure as failure:
                raise invalid(f"{where}: {failure.message}") from None
            for source in self.conditions[name].names:
                yield self._known(source, f"{where}, condition")
        for tensor, sources in step.inputs.items():
            for source in sources:
                yield self._known(source, f"{where}, input '{tensor}'")

    def _known(self, source: str, where: str) -> Reference:
        found = reference(source, self.graph.steps)
        declared = self.graph.inputs
        if found.step is None and declared and source not in declared:
            hint = did_you_mean(source, declared)
            raise invalid(f"{where}: '{source}' is neither an input of the graph nor an output of a step{hint}")
        if found.step is None and not declared and "." in source:
            raise invalid(
                f"{where}: {self._no_step(source)}; an input of the graph by this name has to be under 'inputs'"
            )
        return found

    def _no_step(self, source: str) -> str:
        name = source.partition(".")[0]
        return f"'{source}' is no output of a step: there is no step '{name}'{did_you_mean(name, self.graph.steps)}"

    def _ordered(self) -> Iterator[str]:
        """Yield the steps, each after those that it waits for. Raises Failure(INVALID) for a cycle."""
        waits = {name: set(of) for name, of in self._waits.items()}
        while waits:
            ready = [name for name, of in waits.items() if not of]
            if not ready:
                raise invalid(f"the steps {_listed(_cycle(waits))} wait for each other: a graph has no cycles")
            for name in ready:
                del waits[name]
                yield name
            for of in waits.values():
                of.difference_update(ready)

    def _check_use(self) -> None:
        """Raise Failure(INVALID) for a step that no output needs, and an input that no step reads."""
        needed = self.needed(source for sources in self.graph.outputs.values() for source in sources)
        for name in self.graph.steps:
            if name not in needed:
                raise invalid(f"step '{name}': no output of the graph needs it")
        read = {
            source
            for name, step in self.graph.steps.items()
            for source in (*self._condition_names(name), *(one for sources in step.inputs.values() for one in sources))
        }
        for name in self.graph.inputs:
            if name not in read:
                raise invalid(f"input '{name}': no step reads it")

    def _condition_names(self, name: str) -> tuple[str, ...]:
        condition = self.conditions.get(name)
        return () if condition is None else condition.names

    def needed(self, sources: Iterable[str]) -> set[str]:
        """Return the steps that have to run, or to be skipped, for these sources."""
        todo = [step for source in sources if (step := reference(source, self.graph.steps).step) is not None]
        found: set[str] = set()
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += self._waits[name]
        return found


def _cycle(waits: dict[str, set[str]]) -> list[str]:
    """Return the steps of a cycle."""
    path: list[str] = [next(iter(waits))]
    while path.count(path[-1]) < 2:
        path.append(min(one for one in waits[path[-1]] if one in waits))
    return path[path.index(path[-1]) : -1]


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
