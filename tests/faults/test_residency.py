"""A worker with memory for three models of five: what it loads, unloads and refuses, whatever happens meanwhile.

Orders are given as gateways give them; models are those of the simulated backend, which claim their bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import pytest

from millstream.services.model.manifest import Manifest
from millstream.services.repository.footprints import Measured
from millstream.services.wire.orders import Order
from millstream.services.wire.records import RefusalRecord, State
from tests.kit import v2
from tests.kit.load import constant_load
from tests.kit.shop import BUDGET_BYTES, LEASE_S, MIB, ROW, Shop
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("residency"), settings={"queue_lease_s": LEASE_S}) as stack:
        yield stack


@pytest.fixture
def shop(stack: Stack, request: pytest.FixtureRequest) -> Iterator[Shop]:
    shop = Shop(stack, request.node.name.removeprefix("test_").replace("_", "-")[:30])
    try:
        yield shop
    finally:
        shop.close()


def test_a_worker_holds_what_fits_and_loads_what_is_called(shop: Shop) -> None:
    manifests = {name: shop.publish(name) for name in ("a", "b", "c", "d", "e")}
    shop.start()
    wait_until(lambda: len(shop.settled()) in {2, 3} and shop.record.used_bytes <= BUDGET_BYTES, what="it fits")
    held = shop.ready()
    assert {instance.model for instance in shop.record.instances} == held, "the others are on standby"

    for name in sorted(manifests.keys() - held):
        shop.load(manifests[name])
        wait_until(lambda: shop.record.used_bytes <= BUDGET_BYTES, what="what was not known before its load is repaid")
        shop.until_answers(name)
        instance = shop.instance(manifests[name])
        assert instance is not None
        assert instance.why == "a call"
    wait_until(shop.no_demands, what="all demands are met")
    assert sum(shop.evictions(name, reason) for name in manifests for reason in ("room", "budget")) >= 2
    assert sum(shop.evictions(name, reason) for name in manifests for reason in ("idle", "moved")) == 0


def test_what_is_called_stays(shop: Shop) -> None:
    manifests = {name: shop.publish(name) for name in ("f", "g", "h", "i")}
    shop.start()
    shop.settled()
    for name in ("f", "g"):
        shop.load(manifests[name])
        shop.until_answers(name)
    missing = next(name for name in ("h", "i") if name not in shop.ready())
    shop.load(manifests[missing])
    assert {"f", "g"} <= shop.ready(), "what was never called was unloaded first"


def test_two_orders_cause_one_load(shop: Shop) -> None:
    manifest = shop.publish("slow", load_s=1.0)
    shop.start()
    order = Order(do="load", content_id=manifest.content_id, why="a call", evict=True)
    for _ in range(3):
        shop.push(order)
    shop.until_ready(manifest)
    wait_until(lambda: not shop.stack.redis.exists(shop.keys.orders(shop.record.id)), what="all orders are taken")
    text = (shop.stack.home / "logs" / f"{shop.pool}-0.log").read_text()
    assert text.count("loading: slow version 1") == 1


def test_a_cold_call_waits_for_its_load_and_is_answered(shop: Shop) -> None:
    names = ("j", "k", "l", "m", "n")
    for name in names:
        shop.publish(name)
    shop.start()
    shop.settled()
    for name in names:
        shop.until_known(name)
        shop.until_answers(name)
    for name in names[:2]:  # the worker may have unloaded them meanwhile
        shop.until_answers(name)
    wait_until(lambda: shop.record.used_bytes <= BUDGET_BYTES, what="within the budget")
    wait_until(shop.no_demands, what="all demands are met")


def test_nothing_in_use_is_unloaded(shop: Shop) -> None:
    busy = [shop.publish(name, run_s=0.05) for name in ("busy-1", "busy-2", "busy-3")]
    cold = [shop.publish(name) for name in ("cold-1", "cold-2")]
    shop.start()
    shop.settled()
    for manifest in (*cold, *busy):  # so that all of them were measured
        shop.until_known(manifest.model)
        shop.until_answers(manifest.model)
    # A late call may unload one of the others, and a refusal for it is passing.
    wait_until(lambda: _all_answer(shop, busy), what="these three are there")
    request = v2.request({"x": ROW}, parameters=v2.PATIENT)
    evicted = sum(shop.evictions(one.model, reason) for one in busy for reason in ("room", "budget"))
    with ExitStack() as loads:
        running = [
            loads.enter_context(
                constant_load(shop.stack.port, f"/v2/models/{one.model}/infer", [request], 4, pause_s=0)
            )
            for one in busy
        ]
        for load in running:
            load.more(5)
        for manifest in cold:
            assert shop.order(manifest)
        # A model of which all callers just got their answers is in use by none, and may go for one of the others.
        for manifest in cold:
            wait_until(lambda: _is_decided(shop, manifest), what="it is refused or loaded")  # noqa: B023
        assert {one.kind for one in shop.record.refusals} <= {"nothing_evictable", "thrashing"}
        for load in running:
            load.more(5)
    evicted = sum(shop.evictions(one.model, reason) for one in busy for reason in ("room", "budget")) - evicted
    for answer in (answer for load in running for answer in load.answers):
        assert answer.status == 200 or (evicted and "retry-after" in answer.headers), answer
    wait_until(shop.no_demands, what="refused demands have ended")
    wait_until(lambda: not shop.record.refusals, what="refusals are over")


def _all_answer(shop: Shop, manifests: list[Manifest]) -> bool:
    names = [manifest.model for manifest in manifests]
    return all(shop.call(name) == 200 for name in names) and set(names) <= shop.ready()


def _is_decided(shop: Shop, manifest: Manifest) -> bool:
    """Whether an order was refused or followed; it is repeated, because a refusal is published for a moment."""
    shop.order(manifest)
    return _is_refused(shop, manifest) or shop.instance(manifest) is not None


def _is_refused(shop: Shop, manifest: Manifest) -> bool:
    return any(one.content_id == manifest.content_id for one in shop.record.refusals)


def test_a_worker_that_is_killed_during_a_demanded_load(shop: Shop) -> None:
    others = [shop.publish(name) for name in ("o", "p", "q")]
    shop.start()
    for manifest in others:
        shop.load(manifest)
    slow = shop.publish("slow-one", load_s=2.0)
    shop.until_known("slow-one")
    with ThreadPoolExecutor(1) as caller:
        call = caller.submit(shop.infer, "slow-one")
        wait_until(lambda: shop.instance(slow), what="its load has begun")
        shop.kill()
        shop.start(index=1)
        reply = call.result()
    assert reply.status_code == 200, reply.text
    wait_until(shop.no_demands, what="all demands are met")


def test_a_version_that_is_deleted_during_its_demanded_load(shop: Shop) -> None:
    steady = shop.publish("steady")
    shop.start()
    shop.settled()
    used_bytes = shop.record.used_bytes
    gone = shop.publish("gone", load_s=60.0)
    shop.order(gone)
    wait_until(lambda: shop.instance(gone), what="its load has begun")
    shop.repository.delete_model("gone")
    wait_until(lambda: shop.instance(gone) is None, what="it is gone")
    wait_until(shop.no_demands, what="its demand has ended")
    wait_until(lambda: shop.record.used_bytes <= used_bytes + 16 * MIB, what="its memory is free")
    assert shop.is_ready(steady)


def test_a_redis_that_loses_its_data_during_a_demanded_load(shop: Shop) -> None:
    shop.start()
    slow = shop.publish("slow-too", load_s=2.0)
    shop.until_known("slow-too")
    with ThreadPoolExecutor(1) as caller:
        call = caller.submit(shop.infer, "slow-too")
        wait_until(lambda: shop.instance(slow), what="its load has begun")
        shop.stack.redis.flushall()
        reply = call.result()
    assert reply.status_code == 200, reply.text
    wait_until(shop.no_demands, what="all demands are met")


def test_orders_to_unload(shop: Shop) -> None:
    pinned, plain, idle = shop.publish("pinned"), shop.publish("plain"), shop.publish("idle")
    shop.start()
    for manifest in (pinned, plain, idle):
        shop.until_ready(manifest)
    shop.place(pinned, pin=True)
    shop.place(idle, idle_s=0.1)
    wait_until(lambda: shop.instance(idle) is None, what="it was idle for too long")
    shop.push(Order(do="unload", content_id=pinned.content_id, why="idle", token=7))
    shop.push(Order(do="unload", content_id=plain.content_id, why="idle", token=6))
    shop.push(Order(do="load", content_id="unknown:1:00", why="of another controller", token=8))
    wait_until(lambda: "its controller was replaced" in shop.log, what="the old token is ignored")
    shop.push(Order(do="unload", content_id=plain.content_id, why="idle", token=8))
    shop.stack.redis.rpush(shop.keys.orders(shop.record.id), b"no order")
    wait_until(lambda: shop.instance(plain) is None, what="it is unloaded")
    wait_until(lambda: "an order cannot be read" in shop.log, what="the order that is none is ignored")
    assert shop.ready() == {"pinned"}
    wait_until(lambda: shop.evictions("idle", "idle") == shop.evictions("plain", "moved") == 1, what="they are counted")
    assert shop.evictions("idle", "room") == shop.evictions("plain", "room") == 0, "memory was not short"
    shop.until_answers("plain")


def test_a_full_worker_unloads_small_models_ahead_of_the_next_call(shop: Shop) -> None:
    small = Measured(resident_bytes=10 * MIB, load_s=0.01)
    names = [f"small-{number}" for number in range(24)]
    for name in names:
        shop.publish_known(name, "simulated.cpu", small, bytes=small.resident_bytes)
    large = shop.publish("large", bytes=500 * MIB)
    shop.start()
    shop.load(large)
    shop.place(large, pin=True)
    called = cycle(names)

    def made_room() -> bool:
        shop.until_answers(next(called))
        return "to keep memory free for the next model that is called" in shop.log

    wait_until(made_room, what="a model is unloaded after a call")
    wait_until(lambda: shop.record.used_bytes <= BUDGET_BYTES, what="within the budget")
    assert shop.is_ready(large), "it is pinned"
    wait_until(shop.no_demands, what="all demands are met")


def test_an_order_does_not_wait_for_the_close_of_another_model(shop: Shop) -> None:
    slow = shop.publish("closes-slowly", bytes=300 * MIB, close_s=600.0)
    shop.start()
    shop.until_ready(slow)
    room = BUDGET_BYTES - _used_bytes(shop, at_least=300 * MIB)
    known = Measured(resident_bytes=room + 100 * MIB, load_s=0.01)
    waiting = shop.publish_known("waits", "simulated.cpu", known, bytes=known.resident_bytes)
    wait_until(lambda: shop.record.token == shop.repository.token(), what="the worker knows")
    for _ in range(3):  # gateways repeat their orders
        shop.push(Order(do="load", content_id=waiting.content_id, why="a call", evict=True))
    wait_until(lambda: shop.instance(slow) is None, what="it is being closed")
    small = Measured(resident_bytes=MIB, load_s=0.01)
    other = shop.publish_known("goes-on", "simulated.cpu", small, bytes=MIB)
    wait_until(lambda: shop.record.token == shop.repository.token(), what="the worker knows")
    shop.push(Order(do="load", content_id=other.content_id, why="a call", evict=True))
    shop.until_ready(other)
    assert shop.record.used_bytes >= 300 * MIB, "its bytes count until it is closed"
    assert not shop.is_ready(waiting)
    assert not shop.record.refusals  # and at the end the worker drains, without waiting for the close


def test_orders_go_on_when_the_close_has_ended(shop: Shop) -> None:
    slow = shop.publish("closes-late", bytes=300 * MIB, close_s=1.0)
    shop.start()
    shop.until_ready(slow)
    room = BUDGET_BYTES - _used_bytes(shop, at_least=300 * MIB)
    known = Measured(resident_bytes=room + 100 * MIB, load_s=0.01)
    waiting = shop.publish_known("follows", "simulated.cpu", known, bytes=known.resident_bytes)
    wait_until(lambda: shop.record.token == shop.repository.token(), what="the worker knows")
    shop.push(Order(do="load", content_id=waiting.content_id, why="a call", evict=True))
    shop.until_ready(waiting)
    assert shop.log.count("unloaded: closes-late") == 1


def test_the_first_load_of_an_unknown_version_stays_within_the_budget(shop: Shop) -> None:
    """The kernel's limit holds: the load alone fails, and what is loaded serves on."""
    steady = shop.publish("serves-on")
    shop.start()
    shop.until_ready(steady)
    assert shop.worker is not None
    pid = shop.worker.pid
    unknown = shop.publish("unknown-size", bytes=BUDGET_BYTES, allocate=True, load_s=0.1)
    shop.until_known("unknown-size")
    wait_until(lambda: "loading: unknown-size" in shop.log and shop.instance(unknown) is None, what="it failed")

    def refused() -> bool:
        shop.order(unknown)
        return _is_refused(shop, unknown)

    wait_until(refused, what="it failed again")
    assert most_bytes(pid) <= BUDGET_BYTES + 8 * MIB
    assert not shop.is_ready(unknown)
    shop.until_answers("serves-on")
    assert shop.worker.poll() is None


def test_an_instance_larger_than_all_memory_goes_and_its_version_fails_with_both_numbers(shop: Shop) -> None:
    shop.start()
    huge = shop.publish("turns-out-huge", bytes=2 * BUDGET_BYTES)  # claimed: no allocation fails
    wait_until(lambda: "failed: turns-out-huge" in shop.log, what="it failed")
    wait_until(lambda: {one.state for one in shop.record.instances} == {State.FAILED}, what="it is not loaded")
    instance = shop.instance(huge)
    assert instance is not None
    assert instance.reason is not None
    numbers = re.match(r"it takes (\d+) MiB of memory, and this worker has (\d+) MiB for models", instance.reason)
    assert numbers is not None, instance.reason
    assert int(numbers[1]) << 20 >= 2 * BUDGET_BYTES > BUDGET_BYTES > int(numbers[2]) << 20
    wait_until(lambda: shop.record.used_bytes < BUDGET_BYTES / 2, what="its memory is free")

    def refused() -> bool:
        shop.order(huge)
        return [one.kind for one in shop.record.refusals] == ["too_large"]

    wait_until(refused, what="an order is refused")


def test_what_exceeds_the_budget_goes_also_if_it_was_loaded_a_moment_ago(shop: Shop) -> None:
    """Two that were loaded a moment ago, which together turn out to take more than there is."""
    shop.start()
    first = shop.publish("first-young", bytes=450 * MIB, load_s=1.0)
    shop.until_ready(first)
    shop.until_known("first-young")
    shop.until_answers("first-young")
    second = shop.publish_known(
        "second-young", "simulated.cpu", Measured(resident_bytes=MIB, load_s=1.0), bytes=450 * MIB, load_s=1.0
    )
    shop.order(second)
    wait_until(lambda: "the worker uses more than its memory budget" in shop.log, what="one of them goes")
    wait_until(lambda: shop.record.used_bytes <= BUDGET_BYTES, what="within the budget")
    assert len(shop.settled()) == 1


def _used_bytes(shop: Shop, at_least: int) -> int:
    """Return what the worker uses. It publishes that an instance is ready before what the instance takes."""

    def used_bytes() -> int:
        used = shop.record.used_bytes
        return used if used >= at_least else 0

    return wait_until(used_bytes, what="the worker's record counts what is loaded")


def most_bytes(pid: int) -> int:
    """The most resident memory of a process since the meter of its last load began."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10


def test_a_version_that_takes_more_memory_than_there_is(shop: Shop) -> None:
    shop.start()
    huge = shop.publish("huge", bytes=4 * BUDGET_BYTES, allocate=True)
    shop.until_known("huge")
    wait_until(lambda: shop.instance(huge), what="it was tried")
    wait_until(lambda: {one.state for one in shop.record.instances} == {State.FAILED}, what="it has failed")

    def refusals() -> tuple[RefusalRecord, ...]:
        shop.order(huge)
        return shop.record.refusals

    [refusal] = wait_until(refusals, what="it is refused")
    assert (refusal.content_id, refusal.kind) == (huge.content_id, "too_large")
    assert "it takes " in refusal.reason
    wait_until(shop.no_demands, what="its demand has ended")
    small = shop.publish("small")
    shop.until_ready(small)
