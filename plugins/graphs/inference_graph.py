"""KServe's InferenceGraph: nodes that route requests between services, read into a Graph. Pure.

document ─> its nodes, checked ─> Graph with the steps alone ─(signatures of their versions)─> resolved: what each takes

KServe passes JSON from service to service, and here tensors go: a step takes the request or the response before it by
the names of its inputs; where both have one tensor, that is it.
Source: kserve/kserve, pkg/apis/serving/v1alpha1/inference_graph.go and cmd/router/main.go.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from millstream.plugins.graphs.document import NAME_CHARACTERS_MAX, STEPS_MAX, DeclaredTensor, Graph, Step
from millstream.services.errors import Failure, invalid
from millstream.services.model.datatypes import BYTES
from millstream.services.model.signature import Signature

ROOT = "root"
DEPTH_MAX = 16  # of nodes in nodes
_TOTAL = 100  # of the weights of a splitter
#: [@this].#(predictions.0=="cat"), or what is in the brackets alone
_CONDITION = re.compile(
    r"^(?:\[@this\]\.#\()?\s*(?P<path>[\w$.:/-]+)\s*(?P<op>==|!=|<=|>=|<|>)\s*"
    r"(?P<value>\"[^\"\\]*\"|-?\d+(?:\.\d+)?|true|false)\s*\)?$"
)
_BODIES = frozenset(
    {"predictions", "instances", "inputs", "outputs", "data"}
)  # members of bodies, not names of tensors
_NAME = Annotated[str, Field(max_length=NAME_CHARACTERS_MAX)]


class RouteStep(BaseModel):
    """A step of a node: a service, which is an endpoint here, or another node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: _NAME = ""
    serviceName: _NAME = ""  # noqa: N815 - KServe's names
    nodeName: _NAME = ""  # noqa: N815
    serviceUrl: str = ""  # noqa: N815
    data: str = "$request"
    weight: int | None = Field(None, ge=0, le=_TOTAL)
    condition: str = Field("", max_length=1000)
    dependency: Literal["", "Soft", "Hard"] = ""

    @property
    def label(self) -> str:
        """What it is called in messages, and in the outputs of an ensemble."""
        return self.name or self.serviceName or self.nodeName


class RouterNode(BaseModel):
    """A node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    routerType: Literal["Sequence", "Splitter", "Ensemble", "Switch"]  # noqa: N815
    steps: list[RouteStep] = Field(min_length=1, max_length=STEPS_MAX)


class _Nodes(BaseModel):
    nodes: dict[_NAME, RouterNode] = Field(max_length=STEPS_MAX)


class _Made(NamedTuple):
    """A tensor of a response: where it comes from, and its kind."""

    sources: tuple[str, ...]
    datatype: str
    rank: int


Bundle = Mapping[str, _Made]


def read_inference_graph(document: Mapping[str, Any]) -> Graph:
    """Return the graph of an InferenceGraph. Raises Failure(INVALID), pydantic.ValidationError."""
    spec = document.get("spec")
    nodes = _Nodes.model_validate({"nodes": spec.get("nodes", {}) if isinstance(spec, dict) else {}}).nodes
    if ROOT not in nodes:
        raise invalid(f"the InferenceGraph has no node '{ROOT}'")
    for name, node in nodes.items():
        _check(name, node, nodes)
        if node.routerType == "Splitter":
            asked = [step for step in node.steps if step.weight]
            nodes[name] = node.model_copy(update={"steps": asked})
    steps = {name: Step(model=model, inputs={}) for name, model in _services(nodes)}
    return Graph(form="kserve", steps=steps, routes={name: node.model_dump() for name, node in nodes.items()})


def _check(name: str, node: RouterNode, nodes: Mapping[str, RouterNode]) -> None:
    """Raise Failure(INVALID) for a node that cannot route."""
    where = f"node '{name}'"
    for step in node.steps:
        if step.serviceUrl:
            raise invalid(f"{where}: no URL is called ({step.serviceUrl[:80]}): name an endpoint by serviceName")
        if bool(step.serviceName) is bool(step.nodeName):
            raise invalid(f"{where}: a step has either serviceName or nodeName")
        if step.nodeName and step.nodeName not in nodes:
            raise invalid(f"{where}: there is no node '{step.nodeName}'")
        if step.condition and not _CONDITION.match(step.condition):
            raise invalid(
                f"{where}: the condition {step.condition[:100]!r} is not understood: compare a value, like "
                '[@this].#(predictions.0=="cat")'
            )
    if node.routerType == "Splitter" and sum(step.weight or 0 for step in node.steps) != _TOTAL:
        raise invalid(f"{where}: the weights of its steps add up to {_TOTAL}")
    if node.routerType == "Switch" and not all(step.condition for step in node.steps):
        raise invalid(f"{where}: each step of a Switch has a condition")


def _services(nodes: Mapping[str, RouterNode]) -> Iterator[tuple[str, str]]:
    """Yield a name for each call of a service, and its model, as `_Flattening` makes them."""
    known: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        if name in above:
            raise invalid(f"node '{name}' leads to itself: a graph has no cycles")
        if len(above) > DEPTH_MAX:
            raise invalid(f"nodes within nodes may be {DEPTH_MAX} deep")
        for step in nodes[name].steps:
            if step.nodeName:
                yield from walk(step.nodeName, (*above, name))
            elif len(known) == STEPS_MAX:
                raise invalid(f"the graph calls more than {STEPS_MAX} services")
            else:
                yield _unique(step.label, known), step.serviceName

    yield from walk(ROOT, ())


def _unique(label: str, known: set[str]) -> str:
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", label)[:56]
    first = plain if re.match("[A-Za-z_]", plain) else f"_{plain}"
    name, count = first, 1
    while name in known:
        count += 1
        name = f"{first}_{count}"
    known.add(name)
    return name


def resolved(graph: Graph, signatures: Sequence[Signature]) -> Graph:
    """Return a graph whose steps have inputs; another one than KServe's is returned as it is. Raises Failure(INVALID).

    `signatures`: of the steps' versions.
    """
    if not graph.routes:
        return graph
    nodes = _Nodes.model_validate({"nodes": graph.routes}).nodes
    found = _Flattening(nodes, graph, dict(zip(graph.steps, signatures, strict=True)))
    try:
        answer = found.node(ROOT, None, "")
        return Graph(
            form="kserve",
            inputs=found.request,
            steps=found.steps,
            outputs={name: made.sources for name, made in answer.items()},
            routes=graph.routes,
        )
    except ValidationError as error:  # conditions and ways add up
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        raise invalid(f"the InferenceGraph has too many ways: {where}: {first['msg']}") from None


class _Flattening:
    """Walks through the nodes in their order. `request`: the tensors of the request, as far as they are known."""

    def __init__(self, nodes: Mapping[str, RouterNode], graph: Graph, signatures: Mapping[str, Signature]) -> None:
        self._nodes, self._signatures = nodes, signatures
        self._names = iter(graph.steps.items())
        self._draws = 0
        self.request: dict[str, DeclaredTensor | None] = {}
        self.steps: dict[str, Step] = {}
        first = next(iter(signatures.values()))
        needed = [spec.name for spec in first.inputs if not spec.optional]
        self._only = needed[0] if len(needed) == 1 else ""  # the one tensor of the request

    def node(self, name: str, given: Bundle | None, guard: str) -> Bundle:
        """Return what a node answers. `given`: None: the request; `guard`: when it is asked."""
        node = self._nodes[name]
        route = {
            "Sequence": self._sequence,
            "Splitter": self._splitter,
            "Switch": self._switch,
            "Ensemble": self._ensemble,
        }[node.routerType]
        try:
            return route(node.steps, given, guard)
        except Failure as failure:
            if failure.message.startswith("node '"):
                raise
            raise invalid(f"node '{name}': {failure.message}") from None

    def _sequence(self, steps: Sequence[RouteStep], given: Bundle | None, guard: str) -> Bundle:
        """A step whose condition does not hold ends the sequence, with the response before it."""
        answers: list[Bundle] = []
        last: Bundle | None = None
        for step in steps:
            if step.condition and last is not None:
                guard = _both(guard, self._condition(step.condition, last))
                answers.append(last)
            takes = last if last is not None and step.data.startswith("$response") else given
            last = self._step(step, takes, guard)
        assert last is not None
        return _joined([last, *reversed(answers)])

    def _splitter(self, steps: Sequence[RouteStep], given: Bundle | None, guard: str) -> Bundle:
        self._draws += 1
        drawn, low, answers = f'draw("{self._draws}")', 0, []
        for step in steps:
            high = low + (step.weight or 0)
            share = f"{drawn} >= {low / _TOTAL} and {drawn} < {high / _TOTAL}"
            answers.append(self._step(step, given, _both(guard, share)))
            low = high
        return _joined(answers)

    def _switch(self, steps: Sequence[RouteStep], given: Bundle | None, guard: str) -> Bundle:
        """The first step whose condition holds is asked."""
        answers: list[Bundle] = []
        for step in steps:
            holds = self._condition(step.condition, given)
            answers.append(self._step(step, given, _both(guard, holds)))
            guard = _both(guard, f"not ({holds})")
        return _joined(answers)

    def _ensemble(self, steps: Sequence[RouteStep], given: Bundle | None, guard: str) -> Bundle:
        answers = [(step.label, self._step(step, given, guard)) for step in steps]
        return {f"{label}.{name}": made for label, answer in answers for name, made in answer.items()}

    def _step(self, step: RouteStep, given: Bundle | None, guard: str) -> Bundle:
        if step.nodeName:
            return self.node(step.nodeName, given, guard)
        name, stub = next(self._names)
        signature = self._signatures[name]
        needed = [spec for spec in signature.inputs if not spec.optional]
        inputs: dict[str, tuple[str, ...]] = {}
        for spec in needed:
            if given is None:
                inputs[spec.name] = (self._of_request(spec.name, single=len(needed) == 1),)
            elif spec.name in given:
                inputs[spec.name] = given[spec.name].sources
            elif len(needed) == len(given) == 1:
                inputs[spec.name] = next(iter(given.values())).sources
            else:
                raise invalid(
                    f"input '{spec.name}' of '{stub.model}' is none of what it is given ({', '.join(given)[:200]}): "
                    "the names have to be equal, unless both have one tensor"
                )
        self.steps[name] = Step(model=stub.model, inputs=inputs, condition=guard)
        return {
            spec.name: _Made((f"{name}.{spec.name}",), spec.datatype, len(spec.shape))
            for spec in signature.outputs
            if not spec.on_request
        }

    def _of_request(self, name: str, *, single: bool, declared: DeclaredTensor | None = None) -> str:
        """Return the tensor of the request for an input of this name; the only one stands for another only one."""
        if single and name not in self.request and self._only:
            name = self._only
        self.request.setdefault(name, declared)
        return name

    def _condition(self, text: str, given: Bundle | None) -> str:
        """Return a condition in our form. Raises Failure(INVALID)."""
        match = _CONDITION.match(text)
        assert match is not None  # it was checked
        parts = [part for part in match["path"].split(".") if part not in _BODIES and not part.startswith("$")]
        numbers = [part for part in parts if part.isdigit()]
        name = ".".join(part for part in parts if not part.isdigit())
        if any(int(number) for number in numbers):
            raise invalid(f"the condition {text[:100]!r}: only the first element of a tensor can be compared")
        value = {"true": "True", "false": "False"}.get(match["value"], match["value"])
        if given is None:
            kind = DeclaredTensor(datatype=BYTES if value.startswith('"') else None, shape=None)
            source = self._of_request(name, single=False, declared=kind) if name else self._only
        else:
            made = given.get(name) if name else next(iter(given.values())) if len(given) == 1 else None
            if made is not None and len(made.sources) > 1:
                raise invalid(f"the condition {text[:100]!r} reads the answer of several ways")
            source = "" if made is None else made.sources[0]
        if not source:
            known = "" if given is None else f", it has {', '.join(given)[:200]}"
            raise invalid(f"the condition {text[:100]!r} names no tensor of what it is given{known}")
        return f'first("{source}") {match["op"]} {value}'


def _both(one: str, other: str) -> str:
    return f"{one} and ({other})" if one else f"({other})"


def _joined(answers: Sequence[Bundle]) -> Bundle:
    """Return one response for several ways: tensors of one name are one, and so are the only ones of one kind."""
    kinds = [next(iter(answer.values()))[1:] for answer in answers if len(answer) == 1]
    if len(kinds) == len(answers) and len(set(kinds)) == 1:
        first = next(iter(answers[0]))
        sources = [source for answer in answers for made in answer.values() for source in made.sources]
        return {first: _Made(tuple(dict.fromkeys(sources)), *kinds[0])}
    joined: dict[str, _Made] = {}
    for answer in answers:
        for name, made in answer.items():
            known = joined.get(name)
            before = () if known is None else known.sources
            joined[name] = made._replace(sources=tuple(dict.fromkeys((*before, *made.sources))))
    return joined
