"""Runs a trace against a fleet under a virtual clock. Pure.

calls, loads that end, prefetches that are due ─> the earliest first ─> a policy decides ─> Outcome

Simulated: the memory, loads in parallel, run slots and queues of each worker; calls that wait for a load within their
deadline; refusals. Not simulated: the network, batches, failures. A load takes its model's load time, an unload none.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from millstream.services.placement.simulation.fleet_state import FleetState, Load, SimulatedInstance, SimulatedWorker
from millstream.services.placement.simulation.models import SimulatedModel
from millstream.services.placement.simulation.policies import Policy
from millstream.services.placement.simulation.traffic import Trace
from millstream.services.placement.views import Refusal, RefusalKind

WARMUP_SHARE = 0.25  # of the trace, which is simulated but not counted: at the start nothing is loaded
PROGRESS_CALLS = 20_000  # calls between two reports of progress
SAMPLE_S = 300.0  # virtual time between two looks at the memory
IN_TIME_S = 0.1  # a call is answered in time within this beyond its run


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The simulated workers.

    Args:
        memory_bytes: of one worker, for models.
        loads: loads that a worker makes at the same time.
        runs: runs that a worker makes at the same time.
        timeout_s: how long a call waits.
    """

    workers: int
    memory_bytes: int
    loads: int = 1
    runs: int = 2
    timeout_s: float = 30.0


@dataclass(slots=True)
class Outcome:
    """What happened in the counted part of a trace.

    Args:
        cold_s: seconds until the answer, of each call that found its model not loaded and was answered.
        refused: kind of refusal -> calls.
        expired: calls whose deadline passed while they waited.
        in_time: calls that were answered within IN_TIME_S beyond their run.
        memory_shares: used share of all memory, every SAMPLE_S.
    """

    policy: str
    calls: int = 0
    hits: int = 0
    in_time: int = 0
    cold_s: list[float] = field(default_factory=list)
    refused: Counter[RefusalKind] = field(default_factory=Counter)
    expired: int = 0
    loads: int = 0
    prefetches: int = 0
    evictions: int = 0
    memory_shares: list[float] = field(default_factory=list)


class Simulator:
    """One run of one policy over one trace."""

    def __init__(
        self,
        models: list[SimulatedModel],
        options: FleetOptions,
        policy: Callable[[FleetState, int], Policy],
        seed: int = 0,
    ) -> None:
        workers = [SimulatedWorker(at, options.memory_bytes, [0.0] * options.runs) for at in range(options.workers)]
        self._options = options
        self._state = FleetState(models, workers)
        self._policy = policy(self._state, seed)
        self.outcome = Outcome(self._policy.name)
        self._events: list[tuple[float, int, int, int]] = []  # instant, number, worker (-1: prefetch), model
        self._number = 0
        self._loads: dict[int, Load] = {}  # model -> its load that waits or is in progress
        self._counted = False
        self._last_refusal = RefusalKind.NOTHING_EVICTABLE

    def run(self, trace: Trace, progress: Callable[[float], None] = lambda _: None) -> Outcome:
        """Return what happens; calls `progress` with the share of the calls that is done."""
        count_from = WARMUP_SHARE * trace.end_s
        sample_at = count_from
        calls = len(trace)
        for at, (now, model) in enumerate(zip(trace.seconds.tolist(), trace.models.tolist(), strict=True)):
            while self._events and self._events[0][0] <= now:
                self._next_event()
            if now >= sample_at:
                self._counted = True
                self._sample()
                sample_at += SAMPLE_S
            if at % PROGRESS_CALLS == 0:
                progress(at / calls)
            self._call(model, now)
        self._counted = False
        progress(1.0)
        return self.outcome

    def _next_event(self) -> None:
        now, _, worker, model = heapq.heappop(self._events)
        if worker < 0:
            self._prefetch(model, now)
        else:
            self._loaded(self._state.workers[worker], model, now)

    def _at(self, now: float, worker: int, model: int) -> None:
        self._number += 1
        heapq.heappush(self._events, (now, self._number, worker, model))

    def _call(self, model: int, now: float) -> None:
        state = self._state
        self.outcome.calls += self._counted
        state.called(model, now)
        holder = state.holders[model]
        if holder >= 0:
            self.outcome.hits += self._counted
            self._run(state.workers[holder], model, now, now)
        elif model in self._loads:
            self._loads[model].waiting.append(now)
        else:
            self._cold_call(model, now)
        expected_at = self._policy.next_prefetch(model)
        if expected_at is not None and expected_at > now:
            self._at(expected_at, -1, model)

    def _cold_call(self, model: int, now: float) -> None:
        chosen = self._policy.choose(model, now)
        if isinstance(chosen, Refusal):
            self._refuse(chosen.kind, 1)
            return
        load = self._order(model, chosen, now)
        if self._state.models[model].footprint.load_s > self._options.timeout_s:
            self._refuse(RefusalKind.TOO_SLOW, 1)  # it is loaded all the same, for the next call
        elif load is not None:
            load.waiting.append(now)
        else:
            self._refuse(self._last_refusal, 1)

    def _prefetch(self, model: int, now: float) -> None:
        if self._state.holders[model] >= 0 or model in self._loads:
            return
        worker = self._policy.prefetch(model, now)
        if worker is not None:
            self.outcome.prefetches += self._counted
            self._order(model, worker, now)

    def _order(self, model: int, worker: int, now: float) -> Load | None:
        """Order a worker to load a model; return None if it refuses at once."""
        load = self._loads[model] = Load(model)
        target = self._state.workers[worker]
        target.queue.append(load)
        self._begin_loads(target, now)
        self._policy.changed(target, now)
        return load if model in self._loads else None

    def _begin_loads(self, worker: SimulatedWorker, now: float) -> None:
        """Begin the loads that a worker has a slot for, or refuse them if it cannot make room."""
        while worker.queue and worker.loads < self._options.loads:
            load = worker.queue.popleft()
            victims = self._policy.make_room(worker, load.model, now)
            if isinstance(victims, Refusal):
                del self._loads[load.model]
                self._last_refusal = victims.kind
                self._refuse(victims.kind, len(load.waiting))
                continue
            for victim in victims:
                self._unload(worker, victim)
            worker.loads += 1
            worker.instances[load.model] = SimulatedInstance(last_used=now)
            self._state.count(worker, now)
            self.outcome.loads += self._counted
            self._at(now + self._state.models[load.model].footprint.load_s, worker.index, load.model)

    def _unload(self, worker: SimulatedWorker, model: int) -> None:
        del worker.instances[model]
        self._state.holders[model] = -1
        self.outcome.evictions += self._counted

    def _loaded(self, worker: SimulatedWorker, model: int, now: float) -> None:
        """End a load: the calls that wait for it run, and the next load begins."""
        worker.loads -= 1
        worker.instances[model].loaded_at = now
        self._state.count(worker, now)
        self._state.holders[model] = worker.index
        for called_at in self._loads.pop(model).waiting:
            self._run(worker, model, called_at, now)
        self._begin_loads(worker, now)
        self._policy.changed(worker, now)

    def _refuse(self, kind: RefusalKind, calls: int) -> None:
        if self._counted and calls:
            self.outcome.refused[kind] += calls

    def _sample(self) -> None:
        options = self._options
        used_bytes = sum(worker.used_bytes for worker in self._state.workers)
        self.outcome.memory_shares.append(used_bytes / (options.memory_bytes * options.workers))

    def _run(self, worker: SimulatedWorker, model: int, called_at: float, now: float) -> None:
        """Run a call on the slot that is free first, and count its time."""
        run_s = self._state.models[model].run_s
        slot = min(range(len(worker.free_at)), key=worker.free_at.__getitem__)
        end = max(now, worker.free_at[slot]) + run_s
        instance = worker.instances[model]
        instance.last_used = now
        if end - called_at > self._options.timeout_s:
            self.outcome.expired += self._counted
            return
        worker.free_at[slot] = end
        instance.busy_until = max(instance.busy_until, end)
        if not self._counted:
            return
        if end - called_at <= run_s + IN_TIME_S:
            self.outcome.in_time += 1
        if called_at < now:
            self.outcome.cold_s.append(end - called_at)
