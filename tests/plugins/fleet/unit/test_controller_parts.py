"""The pure parts of the controller, under a clock of the test: the lease, orders in flight, the survey."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from millstream.gateway.placement.pool_fleets import placed_instance
from millstream.plugins.fleet.controller.in_flight import (
    IN_FLIGHT_MAX,
    NO_EFFECT_S_MAX,
    OF_WORKER_MAX,
    Given,
    InFlight,
    Outcome,
)
from millstream.plugins.fleet.controller.leadership import LEASE_S, MARGIN_S, Lease
from millstream.plugins.fleet.controller.loops import scale_limits
from millstream.plugins.fleet.controller.survey import REMEMBERED_MAX, USED_S, Survey
from millstream.plugins.fleet.planned import Unmeasured
from millstream.plugins.fleet.supervisor import unsized_pools
from millstream.services.model.manifest import Endpoint, EndpointPlacement, Manifest
from millstream.services.placement.usage import NO_USAGE
from millstream.services.placement.views import Footprint
from millstream.services.repository.footprints import Measured, file_bytes
from millstream.services.repository.stored_models import StoredModel
from millstream.services.repository.verdicts import NO_VERDICT
from millstream.services.settings import Settings, settings_class
from millstream.services.wire.records import InstanceRecord, RefusalRecord, State, WorkerRecord
from tests.contract.repositories import manifest
from tests.kit.catalog import worker

PREDICTED = Footprint(100, 50, 2.0)


def record(name: str = "w", *instances: InstanceRecord, **fields: Any) -> WorkerRecord:
    return worker(name=name).model_copy(update={"instances": instances, **fields})


def instance(content_id: str, state: State = State.READY, **fields: Any) -> InstanceRecord:
    return InstanceRecord(content_id=content_id, model=content_id.partition(":")[0], version=1, state=state, **fields)


def test_a_lease_is_sure_until_its_margin_and_from_when_it_was_asked_for():
    lease = Lease()
    assert lease.token(0.0) == 0
    lease.renewed(7, "me", 100.0)
    until = 100.0 + LEASE_S - MARGIN_S
    assert (lease.token(until - 0.001), lease.token(until)) == (7, 0)  # after a pause of the process, too
    lease.renewed(7, "me", until + 5)
    assert lease.token(until + 5) == 7
    lease.refused()
    assert (lease.token(until + 5), lease.last_token) == (0, 0)
    lease.renewed(0, "another", until + 6)
    assert (lease.token(until + 6), lease.leader) == (0, "another")


def test_only_pools_that_an_operator_named_have_limits():
    assert scale_limits(settings_class()()) == {}
    assert scale_limits(settings_class()(pools="")) == {}  # an unset variable of compose
    named = scale_limits(settings_class()(pools="cpu=1:4,gpu=2"))
    assert {pool: (one.workers_min, one.workers_max, one.bounded) for pool, one in named.items()} == {
        "cpu": (1, 4, True),
        "gpu": (2, 2, True),
    }


def given_order(content_id: str = "m:1:c", do: Any = "load", name: str = "w", at: float = 10.0) -> Given:
    return Given(name, content_id, do, at)


def test_what_becomes_of_an_order_to_load():
    for record_after, now, expected in (
        (record("w", instance("m:1:c")), 11, Outcome.DONE),
        (record("w", instance("m:1:c", State.LOADING)), 1e6, None),
        (record("w", instance("m:1:c", State.WARMING)), 1e6, None),
        (record("w", instance("m:1:c", State.FAILED, reason="broken")), 11, Outcome.FAILED),
        (record("w"), 11, None),
        (record("w"), 10 + NO_EFFECT_S_MAX + 1, Outcome.LOST),
        (record("other"), 11, Outcome.LOST),
        (
            record("w", refusals=(RefusalRecord(content_id="m:1:c", kind="too_large", reason="8 > 4", until=99),)),
            11,
            Outcome.REFUSED,
        ),
    ):
        in_flight = InFlight()
        in_flight.add(given_order())
        settled = in_flight.settle([record_after], now)
        assert [one.outcome for one in settled] == ([] if expected is None else [expected])
        assert len(in_flight) == (1 if expected is None else 0)


def test_what_becomes_of_an_order_to_unload():
    for record_after, now, expected in (
        (record("w"), 11, Outcome.DONE),
        (record("w", instance("m:1:c", State.DRAINING)), 1e6, None),
        (record("w", instance("m:1:c")), 11, None),
        (record("w", instance("m:1:c")), 10 + NO_EFFECT_S_MAX + 1, Outcome.LOST),
        (record("other"), 11, Outcome.DONE),  # as after each restart of a worker
    ):
        in_flight = InFlight()
        in_flight.add(given_order(do="unload"))
        settled = in_flight.settle([record_after], now)
        assert [one.outcome for one in settled] == ([] if expected is None else [expected])


_STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.booleans()), max_size=60)


@given(_STEPS)
def test_no_order_is_given_twice_and_the_number_is_bounded(steps):
    in_flight = InFlight()
    open_orders: set[tuple[str, str]] = set()
    for name, number, settle in steps:
        content_id = f"m{number}:1:c"
        if settle:
            gone = [record(one) for one in "abc" if one != name]
            in_flight.settle(gone, 11)
            open_orders = {key for key in open_orders if key[0] != name}
        elif in_flight.admits(name, content_id):
            assert (name, content_id) not in open_orders
            in_flight.add(given_order(content_id, name=name))
            open_orders.add((name, content_id))
        assert len(in_flight) == len(open_orders) <= IN_FLIGHT_MAX
        assert all(sum(one == each for one, _ in open_orders) <= OF_WORKER_MAX for each in "abc")
    in_flight.clear()
    assert in_flight.admits("a", "m0:1:c")


def stored(
    *manifests: Manifest, active: int | None = 1, placement: EndpointPlacement | None = None, loaded: Any = None
) -> Mapping[str, StoredModel]:
    name = manifests[0].model
    endpoint = Endpoint(model=name, active=active, placement=placement or EndpointPlacement(), loaded=loaded)
    return {name: StoredModel(endpoint, {one.version: (one, NO_VERDICT) for one in manifests})}


def test_settings_of_the_endpoint_hold_for_the_active_version():
    first, second = manifest("m", 1), manifest("m", 2)
    placement = EndpointPlacement(instances_min=2, instances_max=3, pin=True)
    survey = Survey(lambda _, __: PREDICTED)
    found = survey.take([record()], stored(first, second, placement=placement), 1000.0)
    one, two = found.versions
    assert (one.content_id, one.instances_min, one.instances_max, one.pin) == (first.content_id, 2, 3, True)
    assert (two.content_id, two.instances_min, two.instances_max, two.pin) == (second.content_id, 0, 3, False)
    assert one.pools == ("cpu",)
    assert one.footprints == {"cpu": PREDICTED}
    assert (found.instances_ready, found.instances_wanted, found.instances_missing) == (0, 2, 2)
    assert (
        survey.take([record()], stored(first, second, loaded=(2,)), 1000.0).versions[0].content_id == second.content_id
    )
    failed = {
        "m": StoredModel(
            Endpoint(model="m"), {1: (first, NO_VERDICT.with_failure("onnxruntime.cpu", "it crashes", 1.0))}
        )
    }
    assert survey.take([record()], failed, 1000.0).versions == ()


def test_what_is_known_of_a_version_that_was_never_measured():
    one = manifest("m", 1)
    too_little = Measured(resident_bytes=100, peak_bytes=90, measured=False)
    [known] = Survey(lambda _, __: PREDICTED, lambda _, __: too_little).take([record()], stored(one), 1.0).versions
    assert known.unmeasured == {"cpu": Unmeasured(file_bytes(one), Footprint(100, 90))}
    [known] = Survey(lambda _, __: PREDICTED).take([record()], stored(one), 1.0).versions
    assert known.unmeasured == {"cpu": Unmeasured(file_bytes(one))}
    measured = replace(PREDICTED, measured=True)
    [known] = (
        Survey(lambda _, __: measured, lambda _, __: Measured.of(measured)).take([record()], stored(one), 1.0).versions
    )
    assert known.unmeasured == {}


def test_a_worker_is_seen_with_what_it_measured_or_is_expected_to_take():
    one = manifest("m", 1)
    survey = Survey(lambda _, __: PREDICTED)
    models = stored(one, placement=EndpointPlacement(pin=True))
    at = 1000.0
    ready = instance(
        one.content_id, resident_bytes=7, peak_bytes=3, load_s=1.5, loaded_at=900.0, last_used=at - USED_S / 2
    )
    [view] = survey.take([record("w", ready, budget_bytes=64, used_bytes=20)], models, at).workers
    [placed] = view.instances.values()
    assert (view.free_bytes, placed.footprint, placed.loaded_at) == (44, Footprint(7, 3, 1.5, measured=True), 900.0)
    assert (placed.in_use, placed.pinned) == (True, True)
    loading = instance(one.content_id, State.LOADING, usage={"bad": 1.0})
    [view] = survey.take([record("w", loading, instance("x:1:c", State.FAILED))], models, at).workers
    [placed] = view.instances.values()
    assert (placed.footprint, placed.loaded_at, placed.in_use, placed.usage) == (
        PREDICTED,
        float("inf"),
        False,
        NO_USAGE,
    )


def test_a_version_that_took_0_bytes_is_measured():
    one = manifest("m", 1)
    small = instance(one.content_id, peak_bytes=3, load_s=1.5, loaded_at=900.0)
    measured = Footprint(0, 3, 1.5, measured=True)
    [view] = Survey(lambda _, __: PREDICTED).take([record("w", small)], stored(one), 1000.0).workers
    assert view.instances[one.content_id].footprint == measured
    assert placed_instance(small, pinned=False, expected=PREDICTED).footprint == measured
    loading = instance(one.content_id, State.LOADING)
    assert placed_instance(loading, pinned=False, expected=PREDICTED).footprint == PREDICTED


def test_usage_is_remembered_after_an_unload_within_a_limit(monkeypatch):
    monkeypatch.setattr("millstream.plugins.fleet.controller.survey.REMEMBERED_MAX", 2)
    assert REMEMBERED_MAX > 2
    survey = Survey(lambda _, __: PREDICTED)
    names = ["a:1:c", "b:1:c", "c:1:c"]
    for number, name in enumerate(names):
        used = instance(name, last_used=100.0 + number, usage={"10": 4.0})
        survey.take([record("w", used)], {}, 200.0)
    assert [survey.habits(name).last_used for name in names] == [0.0, 101.0, 102.0]
    assert survey.habits("c:1:c").usage.pack() == {"10": 4.0}
    one = manifest("m", 1)
    survey.take([record("w", instance(one.content_id, last_used=150.0, usage={"3": 1.0}))], {}, 200.0)
    [version] = survey.take([record("w")], stored(one), 201.0).versions
    assert (version.last_used, version.usage.pack()) == (150.0, {"3": 1.0})


def test_rates_are_means_over_all_instances_and_end_with_the_calls():
    one = manifest("m", 1)
    survey, models = Survey(lambda _, __: PREDICTED), stored(one)
    version = None
    for second in range(601):
        parts = [instance(one.content_id, runs=1 + 5 * second, busy_s=0.01 * (1 + 5 * second)) for _ in range(2)]
        workers = [record(name, part) for name, part in zip("ab", parts, strict=True)]
        [version] = survey.take(workers, models, 1000.0 + second).versions
    assert version is not None
    assert abs(version.calls_per_s - 10) < 0.01
    assert abs(version.run_s - 0.01) < 1e-9
    reloaded = record("a", instance(one.content_id, runs=2, busy_s=0.02))
    [version] = survey.take([reloaded], models, 1602.0).versions
    assert 0 < version.calls_per_s < 10
    for second in range(2000):
        [version] = survey.take([reloaded], models, 1603.0 + second).versions
    assert (version.calls_per_s, version.run_s) == (0.0, 0.0)


def test_pools_that_nothing_sizes_are_warned_of():
    warning = unsized_pools(Settings(pools="cpu=1:4,fixed=2,sim=0:2"))
    assert "cpu=1:4,sim=0:2" in warning
    assert "fixed" not in warning
    assert unsized_pools(Settings(pools="cpu=2")) == ""
