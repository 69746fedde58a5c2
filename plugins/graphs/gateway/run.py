"""Runs the requests of a graph: each step as a request in the lane of its version, beside those of other callers.

start ─> steps whose inputs are there ─> lanes ……… outputs ─> the steps that waited for them ─> … ─> the answer
a step fails, the deadline passes, the caller goes ─> the other steps are withdrawn, and the request ends

Everything happens in calls of the event loop, without tasks: a step's answer submits the next ones.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from millstream.gateway.connection.error_reply import internal_failure
from millstream.gateway.scheduling.composed import ComposedLane, ComposedParts
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.outputs import Outputs, OutputTensor, Reply
from millstream.plugins.graphs.document import Graph
from millstream.plugins.graphs.gateway.held_tensors import (
    SKIPPED,
    HeldTensor,
    held,
    nothing,
    readable,
    reshaped,
    size_of,
    step_inputs,
)
from millstream.plugins.graphs.gateway.step_statistics import NOT_RUN, StepCounts
from millstream.plugins.graphs.graph_plan import GraphPlan, PlannedStep
from millstream.plugins.graphs.inference_graph import resolved
from millstream.plugins.graphs.structure import Structure
from millstream.services.errors import Code, Failure, invalid

PROTOCOL = "graph"  # under which the metrics of a step's version count its requests
#: share of the time that is left which later steps may claim from a step: their times are predictions
LATER_SHARE_MAX = 0.5


class StepRequest(Request):
    """The request of a step."""

    run: GraphRun
    number: int  # of the step in the plan

    @property
    def wanted(self) -> Sequence[int]:
        return self.run.wanted_of(self.number)


class _StepResponder:
    """Takes the answers of the steps of all graphs."""

    protocol = PROTOCOL

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None:
        for request, reply in zip(requests, outputs.replies([request.rows for request in requests]), strict=True):
            self.answer_one(request, reply)

    def answer_one(self, request: Request, reply: Reply) -> None:
        step = cast("StepRequest", request)
        step.run.take(step, reply)

    def fail(self, request: Request, failure: Failure) -> None:
        step = cast("StepRequest", request)
        step.run.step_failed(step, failure)


_RESPONDER = _StepResponder()


class Needs(NamedTuple):
    """What a request needs for the outputs that it wants.

    Args:
        outputs: by index.
        steps: that have to run, or to be skipped.
        uses: how many of these need a slot.
        answers: slots that an output may come from.
    """

    outputs: Sequence[int]
    steps: frozenset[int]
    uses: Mapping[int, int]
    answers: frozenset[int]

    @classmethod
    def of(cls, plan: GraphPlan, outputs: Sequence[int]) -> Needs:
        """Return what outputs of a plan need."""
        steps = plan.needed(outputs)
        uses = Counter(slot for number in steps for slot in set(plan.steps[number].slots()))
        return cls(outputs, steps, uses, frozenset(slot for index in outputs for slot in plan.outputs[index]))


class GraphRunner:
    """Runs the requests of one graph. The plan is made when its parts are first there."""

    def __init__(self, graph: Graph, made: ComposedParts) -> None:
        self.made = made
        self._graph = graph
        self._plan: GraphPlan | None = None
        self._needs_all: Needs | None = None
        self.counts = StepCounts(made.registry, made.manifest)

    def run(self, request: Request, lane: ComposedLane) -> GraphRun:
        """Return the run of an admitted request. Raises Failure(UNAVAILABLE): a part is not there."""
        return GraphRun(self, self.plan(), request, lane)

    def plan(self) -> GraphPlan:
        """Return the plan. Raises Failure(UNAVAILABLE): a part is not there."""
        if self._plan is None:
            parts = self.made.manifest.parts
            signatures = [self.route(part.content_id, part.label).lane.manifest.answered for part in parts]
            self._plan = GraphPlan(Structure(resolved(self._graph, signatures)), parts, signatures)
        return self._plan

    def needs(self, plan: GraphPlan, wanted: Sequence[int] | None) -> Needs:
        """Return what a request needs that wants these outputs; None: all."""
        if wanted is not None:
            return Needs.of(plan, tuple(dict.fromkeys(wanted)))
        if self._needs_all is None:
            self._needs_all = Needs.of(plan, range(len(plan.outputs)))
        return self._needs_all

    def route(self, content_id: str, label: str) -> ModelRoute:
        """Return the route of a part. Raises Failure(UNAVAILABLE)."""
        route = self.made.routes().get(content_id)
        if route is None:
            message = f"{label}: the version is not served: it was removed or unloaded"
            raise Failure(Code.UNAVAILABLE, message, retry_after_s=1)
        return route

    def run_s(self, rows: int) -> float:
        """Return the measured seconds of the longest chain of steps; 0 while nothing was measured."""
        try:
            plan = self.plan()
        except Failure:
            return 0.0
        later = self.later_s(plan, rows)
        return max(later[number] + self._step_s(step, rows) for number, step in enumerate(plan.steps))

    def later_s(self, plan: GraphPlan, rows: int) -> list[float]:
        """Return of each step the measured seconds of the longest chain of steps that wait for it."""
        later = [0.0] * len(plan.steps)
        for number in range(len(plan.steps) - 1, -1, -1):
            for after in plan.steps[number].after:
                seconds = later[after] + self._step_s(plan.steps[after], rows)
                later[number] = max(later[number], seconds)
        return later

    def _step_s(self, step: PlannedStep, rows: int) -> float:
        route = self.made.routes().get(step.part.content_id)
        return 0.0 if route is None else route.lane.policy.run_s(rows)


class GraphRun:
    """A request of a graph while its steps run.

    `_values`: what is there, by slot; a slot without one is waited for. `_uses`: how many steps still need a slot.
    """

    def __init__(self, runner: GraphRunner, plan: GraphPlan, whole: Request, lane: ComposedLane) -> None:
        self._runner, self._plan, self.whole, self._lane = runner, plan, whole, lane
        needs = runner.needs(plan, whole.wanted)
        self._wanted, self._answers = needs.outputs, needs.answers
        self._left = set(needs.steps)  # those that neither began nor were skipped
        self._active: set[StepRequest] = set()
        self._values: dict[int, HeldTensor] = {slot: held(tensor) for slot, tensor in enumerate(whole.inputs)}
        self._uses = dict(needs.uses)
        self._draws: dict[str, float] = {}
        self._later_s = runner.later_s(plan, whole.rows)
        self._observed = runner.made.records_steps()
        self._held_bytes = 0
        self._todo: deque[int] = deque()
        self._advancing = False
        self._over = False

    def start(self) -> None:
        """Have the first steps run, and the versions of the others loaded meanwhile.

        Raises Failure: a step is refused, or no step can run.
        """
        self._todo.extend(sorted(self._left))
        try:
            self._advance()
            for number in self._left:
                self._runner.made.load_cold(self._plan.steps[number].part.content_id, self.whole.deadline)
        except BaseException:
            self._end()
            raise

    def cancel(self) -> None:
        """Drop the request and its steps: its caller went away."""
        if not self._over:
            self._end()
            self._lane.drop(self.whole)

    def take(self, step: StepRequest, reply: Reply) -> None:
        """Take the outputs of a step, which are views that are valid only now."""
        self._active.discard(step)
        if self._over:
            return
        planned = self._plan.steps[step.number]
        self._runner.counts.answered(step, time.monotonic())
        step.inputs = ()
        try:
            for slot, output in zip(planned.outputs, reply, strict=True):
                if self._needs(slot):
                    self._values[slot] = HeldTensor(output.shape, output.array, size_of(output))
            if self._answer_if_complete():
                return
            self._keep(planned.outputs)
            self._used(planned)
            self._todo.extend(number for number in planned.after if number in self._left)
            self._advance()
        except Failure as failure:
            self._fail(failure)
        except Exception as error:  # no memory, for example
            self._fail(internal_failure(f"the outputs of {planned.part.label} could not be taken", error))

    def step_failed(self, step: StepRequest, failure: Failure) -> None:
        """End the request, because a step failed."""
        self._active.discard(step)
        self._runner.counts.ended(step.step, failure.code.value)
        if not self._over:
            self._fail(_of_step(self._plan.steps[step.number], failure))

    def _keep(self, slots: Iterable[int]) -> None:
        """Copy new tensors, which the request holds from now on. Raises Failure: TOO_LARGE, UNAVAILABLE."""
        made, kept = self._runner.made, 0
        for slot in slots:
            value = self._values.get(slot)
            if value is None:
                continue
            if not isinstance(value.data, list):
                self._values[slot] = value._replace(data=np.array(value.data))
            kept += value.size_bytes
        self._held_bytes += kept
        if self._held_bytes > made.bytes_max:
            raise Failure(
                Code.TOO_LARGE,
                f"the tensors between the steps take {self._held_bytes} bytes, more than the {made.bytes_max} that a "
                "reply may have: ask for less in one request, or raise MILLSTREAM_REPLY_BYTES_MAX",
            )
        if kept:
            made.admission.extend(self.whole, kept)

    def _used(self, step: PlannedStep) -> None:
        """Let go of the tensors that no other step needs after this one."""
        freed = 0
        for slot in set(step.slots()):
            self._uses[slot] -= 1
            if self._uses[slot] or slot in self._answers:
                continue
            value = self._values.pop(slot, None)
            if value is not None and self._plan.producers[slot] is not None:
                freed += value.size_bytes
        if freed:
            self._held_bytes -= freed
            self._runner.made.admission.give_back(self.whole, freed)

    def _advance(self) -> None:
        """Submit or skip the steps that may have what they waited for. Raises Failure."""
        if self._advancing:  # a step was answered while it was submitted: the loop below goes on with those after it
            return
        self._advancing = True
        try:
            while self._todo and not self._over:
                number = self._todo.popleft()
                if number in self._left:
                    self._look_at(number)
        finally:
            self._advancing = False
        if not self._over and not self._answer_if_complete() and not self._active:
            raise self._not_made()

    def _needs(self, slot: int) -> bool:
        return bool(self._uses.get(slot)) or slot in self._answers

    def wanted_of(self, number: int) -> list[int]:
        """Return the outputs of a step that are needed: a graph within this one runs no others."""
        return [index for index, slot in enumerate(self._plan.steps[number].outputs) if self._needs(slot)]

    def _look_at(self, number: int) -> None:
        step = self._plan.steps[number]
        values = self._values
        if step.condition is not None:
            if any(slot not in values for slot in step.reads.values()):
                return
            if not self._condition_holds(step):
                self._skip(number)
                return
        chosen: list[HeldTensor] = []
        for slots, needed in zip(step.inputs, step.needed, strict=True):
            found = SKIPPED
            for slot in slots:
                if slot not in values:
                    return
                if (found := values[slot]) is not SKIPPED:
                    break
            if found is SKIPPED and needed:
                self._skip(number)
                return
            chosen.append(found)
        self._left.discard(number)
        self._submit(number, chosen)

    def _condition_holds(self, step: PlannedStep) -> bool:
        assert step.condition is not None
        if any(self._values[slot] is SKIPPED for slot in step.reads.values()):
            return False
        plan = self._plan
        tensors = {name: readable(self._values[slot], plan.datatypes[slot]) for name, slot in step.reads.items()}
        try:
            return step.condition.holds(tensors, self._draws)
        except Failure as failure:
            self._runner.counts.ended(step.part.step, failure.code.value)
            raise _of_step(step, Failure(failure.code, f"condition: {failure.message}")) from None

    def _skip(self, number: int) -> None:
        step = self._plan.steps[number]
        self._left.discard(number)
        self._runner.counts.ended(step.part.step, NOT_RUN)
        for slot in step.outputs:
            self._values[slot] = SKIPPED
        self._used(step)
        self._todo.extend(after for after in step.after if after in self._left)

    def _submit(self, number: int, values: Sequence[HeldTensor]) -> None:
        """Add a step's request to the lane of its version. Raises Failure that names the step."""
        step, whole = self._plan.steps[number], self.whole
        try:
            route = self._runner.route(step.part.content_id, step.part.label)
            inputs, rows = step_inputs(route.plans, values, reshapes=self._plan.reshapes)
        except Failure as failure:
            raise _of_step(step, failure) from None
        now = time.monotonic()
        later_s = min(self._later_s[number], max(0.0, whole.deadline - now) * LATER_SHARE_MAX)
        request = StepRequest(inputs, rows, whole.priority, now, whole.deadline - later_s, _RESPONDER)
        request.run, request.number, request.step = self, number, step.part.step
        request.request_id, request.account, request.key = whole.request_id, whole.account, whole.key
        if self._observed:
            whole.steps = (*whole.steps, request)
        self._active.add(request)
        try:
            route.lane.add(request, sum([tensor.size_bytes for tensor in inputs]))
        except Failure as failure:
            self._active.discard(request)
            route.lane.record_rejection(PROTOCOL, failure.code)
            self._runner.counts.ended(request.step, failure.code.value)
            raise _of_step(step, failure) from None

    def _answer_if_complete(self) -> bool:
        """Answer the request if all outputs that it wants are there. Steps that still run are withdrawn."""
        chosen: dict[int, HeldTensor] = {}
        for index in self._wanted:
            for slot in self._plan.outputs[index]:
                value = self._values.get(slot)
                if value is None:
                    return False
                if value is not SKIPPED:
                    chosen[index] = value
                    break
            else:
                return False
        reply = [
            self._answered(index, chosen[index])
            if index in chosen
            else OutputTensor(spec.datatype, (0,), nothing(spec.datatype))
            for index, spec in enumerate(self._lane.manifest.signature.outputs)
        ]
        self._end()
        self._lane.answer(self.whole, reply)
        return True

    def _answered(self, index: int, value: HeldTensor) -> OutputTensor:
        spec, data = self._lane.manifest.signature.outputs[index], value.data
        shape = reshaped(value.shape, spec.shape) if self._plan.reshapes else value.shape
        if shape != value.shape and not isinstance(data, list):
            data = data.reshape(shape)
        return OutputTensor(spec.datatype, shape, data)

    def _not_made(self) -> Failure:
        """Return the failure of a request with an output that no step made."""
        for index in self._wanted:
            slots = self._plan.outputs[index]
            if all(self._values.get(slot) is SKIPPED for slot in slots):
                producers = dict.fromkeys(self._plan.producers[slot] for slot in slots)
                labels = [self._plan.steps[number].part.label for number in producers if number is not None]
                name = self._lane.manifest.signature.outputs[index].name
                return invalid(f"output '{name}' was not made for this request: {' and '.join(labels)} did not run")
        return Failure(Code.INTERNAL, "the graph stopped before its outputs were made")

    def _fail(self, failure: Failure) -> None:
        self._end()
        self._lane.fail(self.whole, failure)

    def _end(self) -> None:
        """Withdraw the steps that still run, and let go of all tensors."""
        self._over = True
        active, self._active = self._active, set()
        for step in active:
            step.lane.cancel(step)
            self._runner.counts.ended(step.step, Code.CANCELLED.value)
        self._values = {}
        self._todo.clear()


def _of_step(step: PlannedStep, failure: Failure) -> Failure:
    """Return a failure with the step in its message, and its status and time to retry as they are."""
    if failure.message.startswith("step '"):
        return failure
    return Failure(failure.code, f"{step.part.label}: {failure.message}", retry_after_s=failure.retry_after_s)
