"""Runs a trace against a fleet under a virtual clock. Pure.

calls, loads that end, records, rounds of the controller, restarts ─> the earliest first ─> a policy decides ─> Outcome
call ─> the first of its pools that has the model and answers in time ─none─> load in the first with memory free, else
in the first that makes room

Simulated: the memory, loads in parallel, run slots, queues and line of each worker; calls that wait for a load within
their deadline; refusals; memory that is kept free ahead of calls; the controller; records that show a change only when
they are renewed; restarts of workers. Not simulated: the network, batches, failures. A load takes its model's load
time, an unload none beyond the runs in progress.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from millstream.plugins.plan.simulation.fleet_options import FleetOptions, workers_of
from millstream.plugins.plan.simulation.fleet_state import FleetState, QueuedLoad, SimulatedInstance, SimulatedWorker
from millstream.plugins.plan.simulation.models import SimulatedModel
from millstream.plugins.plan.simulation.policies import Policy
from millstream.plugins.plan.simulation.traffic import Trace
from millstream.services.placement.line import Wait, ready_in_s
from millstream.services.placement.preloads import OrderedLoads
from millstream.services.placement.views import Refusal, RefusalKind
from millstream.services.wire.orders import OrderReason
from millstream.services.wire.records import LoadRecord

WARMUP_SHARE = 0.25  # of the trace, which is simulated but not counted: at the start nothing is loaded
PROGRESS_CALLS = 20_000  # calls between two reports of progress
SAMPLE_S = 300.0  # virtual time between two looks at the memory
RECORD_S = 0.5  # interval at which a worker renews its record
DRAIN_S = 10.0  # from the instant at which a worker takes no more work until its next process serves
IN_TIME_S = 0.1  # a call is answered in time within this beyond its run


DISPLACED_S = 1.0  # between two orders to load a model in the preferred pool while another pool answers its calls


_Lane = tuple[str, int]  # a pool, and the index of a model
_NO_FREE_MEMORY = Refusal(RefusalKind.NOTHING_EVICTABLE, "no memory is free", 1.0)
_NOBODY_WAITS = Refusal(RefusalKind.TOO_SLOW, "its calls wait no longer")


@dataclass(slots=True)
class Outcome:
    """What happened in the counted part of a trace.

    Args:
        cold_s: seconds until the answer, of each call that found its model not loaded and was answered.
        refused: kind of refusal -> calls.
        expired: calls whose deadline passed while they waited.
        planned: orders of the controller that were carried out, by reason.
        in_time: calls that were answered within IN_TIME_S beyond their run.
        memory_shares: used share of all memory, every SAMPLE_S.
        answered: calls that were answered, by pool.
        wait_s: of the calls that were answered, seconds beyond their runs.
        called: counted calls by model.
        served: calls that were answered by model.
    """

    policy: str
    calls: int = 0
    hits: int = 0
    in_time: int = 0
    cold_s: list[float] = field(default_factory=list)
    refused: Counter[RefusalKind] = field(default_factory=Counter)
    expired: int = 0
    loads: int = 0
    planned: Counter[OrderReason] = field(default_factory=Counter)
    evictions: int = 0
    memory_shares: list[float] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    wait_s: float = 0.0
    called: Counter[int] = field(default_factory=Counter)
    served: Counter[int] = field(default_factory=Counter)


class Simulator:
    """One run of one policy over one trace."""

    def __init__(
        self,
        models: list[SimulatedModel],
        options: FleetOptions,
        policy: Callable[[FleetState, int], Policy],
        seed: int = 0,
    ) -> None:
        workers = workers_of(options)
        self._memory_bytes = sum(worker.budget_bytes for worker in workers)
        self._options = options
        self._state = FleetState(models, workers)
        self._policy = policy(self._state, seed)
        self._worker_of = {worker.name: worker for worker in workers}
        self._model_of = {model.name: at for at, model in enumerate(models)}
        self.outcome = Outcome(self._policy.name)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []  # instant, number, what happens
        self._number = 0
        self._loading: Counter[_Lane] = Counter()  # loads that wait or are in progress
        self._waiting: defaultdict[_Lane, list[float]] = defaultdict(list)  # instants of calls that wait for a load
        self._loads_at: dict[_Lane, SimulatedWorker] = {}  # that was ordered last to load it
        self._displaced_at: dict[int, float] = {}  # model -> when it was last ordered in its preferred pool
        self._unpublished: set[int] = set()  # workers whose record is about to show a change
        self._count_from = 0.0
        self._counted = False  # whether that instant is over
        self._last_refusal = RefusalKind.NOTHING_EVICTABLE

    def run(self, trace: Trace, progress: Callable[[float], None] = lambda _: None) -> Outcome:
        """Return what happens; calls `progress` with the share of the calls that is done."""
        self._count_from = sample_at = WARMUP_SHARE * trace.end_s
        calls = len(trace)
        if self._policy.sees_records and self._options.round_s:
            self._at(self._options.round_s, self._round)
        if self._options.restart_s:
            self._at(self._options.restart_s, partial(self._drain, 0))
        for at, (now, model) in enumerate(zip(trace.seconds.tolist(), trace.models.tolist(), strict=True)):
            self._advance(now)
            if now >= sample_at:
                self._counted = True
                self._sample()
                sample_at += SAMPLE_S
            if at % PROGRESS_CALLS == 0:
                progress(at / calls)
            self._call(model, now)
        self._finish(float(trace.seconds[-1]) if calls else 0.0)
        progress(1.0)
        return self.outcome

    def _finish(self, now: float) -> None:
        """End the calls that wait at the end of the trace: they are answered, refused, or their time is over."""
        self._advance(now + self._options.timeout_s)
        for calls in self._waiting.values():
            self.outcome.expired += self._number_counted(calls)
        self._waiting.clear()

    def _number_counted(self, calls: Sequence[float]) -> int:
        return sum(called_at >= self._count_from for called_at in calls)

    def _advance(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            at, _, happen = heapq.heappop(self._events)
            happen(at)

    def _at(self, instant: float, happen: Callable[[float], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (instant, self._number, happen))

    def _call(self, model: int, now: float) -> None:
        state = self._state
        self.outcome.calls += self._counted
        self.outcome.called[model] += self._counted
        state.called(model, now)
        pool, in_time = self._answering(model, now)
        loads_in = "" if in_time else self._loads_in(model, now)
        if loads_in:
            self._wait(loads_in, model, now)
        elif pool:
            self.outcome.hits += self._counted
            self._run(pool, model, now, now)
        else:
            self._refuse(self._last_refusal, 1)

    def _answering(self, model: int, now: float) -> tuple[str, bool]:
        """Return the pool that has a model and answers a call, and whether no other pool is to load it; "": none."""
        state = self._state
        pools = state.pools_of[model]
        able = [pool for pool in pools if state.holders[model] and state.holders_in(pool, model)]
        if not able:
            return "", False
        if len(pools) == 1:
            return able[0], True
        if able[0] != pools[0]:
            self._load_displaced(pools[0], model, now)
        in_time = next((pool for pool in able if self._in_time(pool, model, now)), "")
        return in_time or able[0], bool(in_time)

    def _in_time(self, pool: str, model: int, now: float) -> bool:
        """Return whether a pool that has a model is predicted to answer a call within its timeout."""
        workers = self._state.workers
        free_at = min(min(workers[at].free_at) for at in self._state.holders_in(pool, model))
        return max(now, free_at) + self._run_s(pool, model) - now <= self._options.timeout_s

    def _loads_in(self, model: int, now: float) -> str:
        """Return the pool that loads a model for a call, which is ordered to unless it does; "": none does."""
        state = self._state
        pools = [pool for pool in state.pools_of[model] if not state.holders_in(pool, model)]
        loading = next((pool for pool in pools if self._loading[pool, model]), "")
        if not loading and len(pools) > 1:
            first = self._policy.loading_pool(pools, model)
            pools.sort(key=lambda pool: pool != first)
        return loading or next((pool for pool in pools if self._order_for_calls(pool, model, now)), "")

    def _load_displaced(self, pool: str, model: int, now: float) -> None:
        """Have a model loaded in the pool that its calls prefer, while another one answers them."""
        ordered_at = self._displaced_at.get(model, -math.inf)
        if now - ordered_at >= DISPLACED_S and not self._loading[pool, model]:
            self._displaced_at[model] = now
            if self._policy.is_worth_moving(pool, model, now):
                self._order_for_calls(pool, model, now)

    def _wait(self, pool: str, model: int, now: float) -> None:
        """Let a call wait for a load, unless it takes too long: the model is loaded all the same, for the next call."""
        if self._ready_in_s(pool, model, now) > self._options.timeout_s:
            self._refuse(RefusalKind.TOO_SLOW, 1)
        else:
            self._waiting[pool, model].append(now)

    def _ready_in_s(self, pool: str, model: int, now: float) -> float:
        """Return the seconds until a model is loaded at the earliest that its worker loads, or has in its line."""
        models, worker = self._state.models, self._loads_at[pool, model]
        begun = [(other, one.last_used) for other, one in worker.instances.items() if one.loaded_at == math.inf]
        waiting = [(one.model, 0.0) for one in worker.queue]
        loads = [LoadRecord(content_id=str(one), began=began, yields_s=math.inf) for one, began in begun + waiting]
        load_s = models[model].footprint.load_s
        return ready_in_s(loads, lambda one: models[int(one)].footprint.load_s, str(model), load_s, now)

    def _order_for_calls(self, pool: str, model: int, now: float) -> bool:
        """Order a worker of a pool to load a model, and the next one if it refuses; return whether one loads it."""
        refused: list[int] = []
        for _ in range(self._policy.attempts):
            chosen = self._policy.choose(pool, model, now, refused)
            if isinstance(chosen, Refusal):
                if not refused:
                    self._last_refusal = chosen.kind
                return False
            worker = self._state.workers[chosen]
            self._policy.ordered(worker, model, now)
            if self._order(worker, QueuedLoad(model), now):
                return True
            refused.append(chosen)
        return False

    def _order(self, worker: SimulatedWorker, load: QueuedLoad, now: float) -> bool:
        """Order a worker to load a model; return whether it does."""
        model = load.model
        if worker.draining or model in worker.instances or any(one.model == model for one in worker.queue):
            return False
        calls = next((at for at, one in enumerate(worker.queue) if not one.called), len(worker.queue))
        worker.queue.insert(calls if load.called else len(worker.queue), load)
        self._loading[worker.pool, model] += 1
        self._loads_at[worker.pool, model] = worker
        self._begin_loads(worker, now)
        self._changed(worker, now)
        return load in worker.queue or model in worker.instances

    def _begin_loads(self, worker: SimulatedWorker, now: float) -> None:
        """Begin the loads that a worker has a slot for: the first of its line as soon as there is room for it."""
        while worker.queue and worker.loads < worker.loads_max:
            load = worker.queue[0]
            victims = _NOBODY_WAITS if self._is_over(worker.pool, load, now) else self._make_room(worker, load, now)
            if isinstance(victims, Refusal):
                del worker.queue[0]
                self._last_refusal = victims.kind
                self._lost(worker.pool, load.model, now)
                continue
            if isinstance(victims, Wait):
                runs_end = [one.busy_until for one in worker.instances.values() if one.busy_until > now]
                self._look_at(worker, min([victims.until, *runs_end]))
                return
            for victim in victims:
                self._unload(worker, victim, now)
                self.outcome.evictions += self._counted
            need = self._state.models[load.model].footprint
            if need.load_bytes > worker.budget_bytes - self._state.account_bytes(worker):
                return  # until what is leaving is gone
            del worker.queue[0]
            self._begin_load(worker, load.model, now)

    def _begin_load(self, worker: SimulatedWorker, model: int, now: float) -> None:
        need = self._state.models[model].footprint
        worker.ordered.begin(need)
        worker.used_bytes += need.load_bytes
        worker.loads += 1
        worker.instances[model] = SimulatedInstance(last_used=now)
        self.outcome.loads += self._counted
        self._at(now + need.load_s, partial(self._loaded, worker, model, worker.starts))

    def _is_over(self, pool: str, load: QueuedLoad, now: float) -> bool:
        """Return whether no call waits any more for a load that calls waited for."""
        waiting = self._waiting.get((pool, load.model))
        return load.called and bool(waiting) and waiting[-1] + self._options.timeout_s < now  # type: ignore[index]

    def _look_at(self, worker: SimulatedWorker, instant: float) -> None:
        """Have a worker look again at its line."""
        if instant >= worker.looks_at:
            return
        worker.looks_at = instant
        self._at(instant, partial(self._look, worker, instant))

    def _look(self, worker: SimulatedWorker, instant: float, now: float) -> None:
        if worker.looks_at == instant:
            worker.looks_at = math.inf
            self._begin_loads(worker, now)
            self._changed(worker, now)

    def _make_room(self, worker: SimulatedWorker, load: QueuedLoad, now: float) -> Sequence[int] | Wait | Refusal:
        need = self._state.models[load.model].footprint
        if not load.evict and need.load_bytes > worker.budget_bytes - self._state.account_bytes(worker):
            return _NO_FREE_MEMORY
        return self._policy.make_room(worker, load, now)

    def _lost(self, pool: str, model: int, now: float) -> None:
        """Count that a load will not end; calls that wait for it alone have another worker ordered, or are refused."""
        self._loading[pool, model] -= 1
        calls = [] if self._loading[pool, model] else self._waiting.pop((pool, model), [])
        late = [called_at for called_at in calls if called_at + self._options.timeout_s < now]
        self.outcome.expired += self._number_counted(late)
        calls = calls[len(late) :]
        if not calls:
            return
        other = self._loads_in(model, now)
        if other:
            self._waiting[other, model] += calls
        else:
            self._refuse(self._last_refusal, self._number_counted(calls))

    def _unload(self, worker: SimulatedWorker, model: int, now: float) -> None:
        """Unload a model: its memory is free when its last run has ended."""
        busy_until = worker.instances.pop(model).busy_until
        if worker.index in self._state.holders[model]:
            self._state.holders[model].remove(worker.index)
        size_bytes = self._state.models[model].footprint.resident_bytes
        if busy_until <= now:
            worker.used_bytes -= size_bytes
        else:
            worker.leaving_bytes += size_bytes
            self._at(busy_until, partial(self._left, worker, size_bytes, worker.starts))

    def _left(self, worker: SimulatedWorker, size_bytes: int, starts: int, now: float) -> None:
        if worker.starts == starts:
            worker.leaving_bytes -= size_bytes
            worker.used_bytes -= size_bytes
            self._begin_loads(worker, now)
            self._changed(worker, now)

    def _loaded(self, worker: SimulatedWorker, model: int, starts: int, now: float) -> None:
        """End a load: the calls that wait for it run, and the next load begins."""
        if worker.starts != starts:
            return  # its process was replaced
        worker.loads -= 1
        worker.used_bytes -= self._state.models[model].footprint.peak_bytes
        worker.instances[model].loaded_at = now
        self._loading[worker.pool, model] -= 1
        if not worker.draining:
            self._state.holders[model].append(worker.index)
            for pool in self._state.pools_of[model]:  # calls that wait for another pool come here, too
                for called_at in self._waiting.pop((pool, model), ()):
                    self._run(worker.pool, model, called_at, now)
        worker.ordered.end(self._state.models[model].footprint.load_s, now)
        self._begin_loads(worker, now)
        if not worker.loads and not worker.draining:
            self._unload_ahead(worker, now)
        self._changed(worker, now)

    def _unload_ahead(self, worker: SimulatedWorker, now: float) -> None:
        """Have a worker keep memory free for the next calls of models that it does not have."""
        for victim in self._policy.unload_ahead(worker, now):
            self._unload(worker, victim, now)
            self.outcome.evictions += self._counted

    def _changed(self, worker: SimulatedWorker, now: float) -> None:
        """Have a worker's record show a change when it is renewed next."""
        if not self._policy.sees_records or worker.index in self._unpublished:
            return
        self._unpublished.add(worker.index)
        phase_s = RECORD_S * worker.index / len(self._state.workers)
        beat = math.floor((now - phase_s) / RECORD_S) + 1
        self._at(phase_s + beat * RECORD_S, partial(self._publish, worker))

    def _publish(self, worker: SimulatedWorker, now: float) -> None:
        self._unpublished.discard(worker.index)
        self._policy.published(worker, now)

    def _round(self, now: float) -> None:
        """Carry out what the controller orders."""
        for order in self._policy.round(now):
            worker, model = self._worker_of[order.worker], self._model_of[order.content_id]
            if order.do == "load":
                done = self._order(worker, QueuedLoad(model, order.evict, called=False), now)
            else:
                done = self._unload_planned(worker, model, now)
            if done and self._counted:
                self.outcome.planned[order.reason] += 1
        self._at(now + self._options.round_s, self._round)

    def _unload_planned(self, worker: SimulatedWorker, model: int, now: float) -> bool:
        """Unload a model if its worker may, by what it knows itself; return whether it does."""
        instance = worker.instances.get(model)
        if instance is None or instance.loaded_at > now or instance.busy_until > now:
            return False
        if not worker.draining and self._state.must_stay(worker.pool, model):
            return False
        self._unload(worker, model, now)
        self._changed(worker, now)
        return True

    def _drain(self, index: int, now: float) -> None:
        """Have a worker take no more work; a new process replaces it after DRAIN_S."""
        worker = self._state.workers[index]
        worker.draining = True
        for model in worker.instances:
            if index in self._state.holders[model]:
                self._state.holders[model].remove(index)
        self._changed(worker, now)
        while worker.queue:
            self._lost(worker.pool, worker.queue.popleft().model, now)
        self._at(now + DRAIN_S, partial(self._replace, worker))
        self._at(now + self._options.restart_s, partial(self._drain, (index + 1) % len(self._state.workers)))

    def _replace(self, worker: SimulatedWorker, now: float) -> None:
        loading = [model for model, one in worker.instances.items() if one.loaded_at == math.inf]
        worker.instances.clear()
        worker.used_bytes = worker.leaving_bytes = worker.loads = 0
        worker.starts += 1
        worker.ordered = OrderedLoads()
        worker.draining = False
        worker.free_at = [now] * len(worker.free_at)
        self._changed(worker, now)
        for model in loading:
            self._lost(worker.pool, model, now)

    def _refuse(self, kind: RefusalKind, calls: int) -> None:
        if self._counted and calls:
            self.outcome.refused[kind] += calls

    def _sample(self) -> None:
        used_bytes = sum(map(self._state.account_bytes, self._state.workers))
        self.outcome.memory_shares.append(used_bytes / self._memory_bytes)

    def _run_s(self, pool: str, model: int) -> float:
        return self._state.models[model].run_s / self._state.workers_of[pool][0].speed

    def _run(self, pool: str, model: int, called_at: float, now: float) -> None:
        """Run a call in the holder, on the slot, that is free first, and count its time."""
        workers = self._state.workers
        at = min(self._state.holders_in(pool, model), key=lambda at: min(workers[at].free_at))
        worker, run_s = workers[at], self._run_s(pool, model)
        slot = min(range(len(worker.free_at)), key=worker.free_at.__getitem__)
        end = max(now, worker.free_at[slot]) + run_s
        instance = worker.instances[model]
        counted = called_at >= self._count_from
        if end - called_at > self._options.timeout_s:
            self.outcome.expired += counted
            return
        instance.last_used = end
        worker.free_at[slot] = end
        instance.busy_until = max(instance.busy_until, end)
        if not counted:
            return
        self.outcome.answered[pool] += 1
        self.outcome.served[model] += 1
        self.outcome.wait_s += end - called_at - run_s
        if end - called_at <= run_s + IN_TIME_S:
            self.outcome.in_time += 1
        if called_at < now:
            self.outcome.cold_s.append(end - called_at)
