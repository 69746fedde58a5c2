"""Whose turn it is in a worker's line: nothing goes without need, everybody's turn comes, and residences are kept."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from millstream.services.placement.line import FIRST_CALL_S, RESIDENCE_LOADS, Wait, residence_end, stopped, turn
from millstream.services.placement.room import freed_bytes
from millstream.services.placement.views import Footprint, PlacedInstance, Refusal, RefusalKind, WorkerView
from tests.kit.fleets import IDS, NOW, counted, footprints, workers

protected_ids = st.frozensets(st.sampled_from(IDS), max_size=3)


@given(workers, footprints, protected_ids, st.booleans())
def test_what_goes_makes_room_and_its_residence_is_over(worker, need, protected, called):
    victims = turn(worker, need, NOW, protected, called=called)
    if isinstance(victims, Wait | Refusal):
        return
    gone = [worker.instances[one] for one in victims]
    stay = {one: instance for one, instance in worker.instances.items() if one not in victims}
    assert counted(worker, stay).has_room(need)
    assert all(residence_end(one) <= NOW and not one.pinned and one.content_id not in protected for one in gone)
    assert called or not any(one.in_use for one in gone), "without a call nothing stops that is called"


@given(workers, footprints, protected_ids)
def test_a_turn_comes_once_residences_and_loads_are_over(worker, need, protected):
    """Nobody waits for ever: who waits gets its turn, and who is refused could not get one."""
    answer = turn(worker, need, NOW, protected)
    if not isinstance(answer, Wait | Refusal):
        return
    loaded = {
        one: replace(instance, loaded_at=min(instance.loaded_at, NOW)) for one, instance in worker.instances.items()
    }
    later = turn(counted(worker, loaded), need, NOW + 1e9, protected)
    if isinstance(answer, Wait):
        assert not isinstance(later, Wait)
        assert answer.until > NOW
        assert answer.until < math.inf or any(one.loaded_at == math.inf for one in worker.instances.values())
    else:
        assert answer.kind in {RefusalKind.TOO_LARGE, RefusalKind.NOTHING_EVICTABLE}
        assert isinstance(later, Refusal)


@given(workers, footprints, protected_ids)
def test_while_closes_take_long_the_line_evicts_no_more_than_it_needs(worker, need, protected):
    """Each look at the line, however often, counts what was unloaded before, and unloads nothing for the same need."""
    victims = turn(worker, need, NOW, protected)
    if isinstance(victims, Wait | Refusal):
        return
    host, device = freed_bytes(worker, victims)
    stay = {one: instance for one, instance in worker.instances.items() if one not in victims}
    closing = replace(worker, instances=stay, leaving_bytes=host, device_leaving_bytes=device)
    for later_s in (0.0, 1.0, 60.0):
        assert turn(closing, need, NOW + later_s, protected) == ()


@given(workers, footprints, protected_ids)
def test_what_no_call_waits_for_waits_for_loads_alone(worker, need, protected):
    answer = turn(worker, need, NOW, protected, called=False)
    if isinstance(answer, Wait):
        assert answer.until == math.inf
        assert any(one.loaded_at == math.inf for one in worker.instances.values())
    if isinstance(answer, Refusal) and answer.kind is not RefusalKind.BUSY:
        assert turn(worker, need, NOW, protected) == answer


def _worker(*instances: PlacedInstance) -> WorkerView:
    used_bytes = sum(one.footprint.resident_bytes for one in instances)
    held = {one.content_id: one for one in instances}
    return WorkerView("cpu-1", "cpu", used_bytes, used_bytes, instances=held)


def _instance(name: str, *, load_s: float = 2.0, age_s: float = 0.5, in_use: bool = False, called: bool = True):
    last_used = NOW - age_s / 2 if called else NOW - age_s
    return PlacedInstance(name, Footprint(100, 0, load_s, True), NOW - age_s, last_used, in_use)


NEED = Footprint(100, 0, 2.0)


def test_an_idle_model_that_had_its_calls_goes_at_once_however_young():
    assert turn(_worker(_instance("busy", in_use=True), _instance("idle")), NEED, NOW) == ("idle",)


def test_a_called_model_stays_for_its_residence_and_then_goes():
    worker = _worker(_instance("a", in_use=True))
    end = NOW - 0.5 + 2.0 * RESIDENCE_LOADS
    assert turn(worker, NEED, NOW) == Wait(end)
    assert turn(worker, NEED, end) == ("a",)
    assert turn(worker, NEED, end, called=False) == Refusal(
        RefusalKind.BUSY, "the models that could make room for it are called, or were loaded a moment ago", 1.0
    )


def test_a_model_whose_caller_was_told_to_come_again_waits_for_that_call():
    worker = _worker(_instance("a", called=False))
    assert turn(worker, NEED, NOW) == Wait(NOW - 0.5 + 2.0 * RESIDENCE_LOADS + FIRST_CALL_S)


def test_what_idles_goes_before_what_is_called():
    idle = _instance("idle", age_s=100.0, load_s=50.0)
    called = _instance("called", age_s=100.0, load_s=0.1, in_use=True)
    assert turn(_worker(called, idle), NEED, NOW) == ("idle",)


def test_pinned_models_never_make_room():
    answer = turn(_worker(replace(_instance("a", age_s=1e6), pinned=True)), NEED, NOW)
    assert isinstance(answer, Refusal)
    assert answer.kind is RefusalKind.NOTHING_EVICTABLE


@given(workers)
def test_a_stopped_worker_differs_in_nothing_but_use(worker):
    assert not any(one.in_use for one in stopped(worker).instances.values())
    assert {one: replace(instance, in_use=False) for one, instance in worker.instances.items()} == stopped(
        worker
    ).instances
