"""Callers of more models than fit: each gets its turn within its deadline, whatever the others do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import pytest

from millstream.services.repository.footprints import Measured
from tests.kit import v2
from tests.kit.load import constant_load
from tests.kit.shop import BUDGET_BYTES, LEASE_S, MIB, MODEL_BYTES, ROW, Shop
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

KIND = "simulated.cpu"
ANSWERS = 10  # of each caller


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"queue_lease_s": LEASE_S}
    with running_stack(tmp_path_factory.mktemp("line"), gateways=2, settings=settings) as stack:
        yield stack


@pytest.fixture
def shop(stack: Stack, request: pytest.FixtureRequest) -> Iterator[Shop]:
    shop = Shop(stack, request.node.name.removeprefix("test_").replace("_", "-")[:30])
    try:
        yield shop
    finally:
        shop.close()


def infer(shop: Shop, name: str, timeout_s: float) -> httpx2.Response:
    body, headers = v2.request({"x": ROW}, parameters={"timeout": round(timeout_s * 1e6)})
    return shop.stack.http.post(f"/v2/models/{name}/infer", content=body, headers=headers)


def test_with_memory_one_model_short_every_call_is_answered_in_time(shop: Shop) -> None:
    """None of them was measured before, and two callers of each never pause."""
    names = [f"turn-{number}" for number in range(4)]
    for name in names:
        shop.publish(name, load_s=0.3, run_s=0.002)
    shop.start()
    for name in names:
        shop.until_known(name)
    with ThreadPoolExecutor(2 * len(names)) as callers:
        calls = [
            callers.submit(lambda name=name: [shop.infer(name) for _ in range(ANSWERS)])  # type: ignore[misc]
            for name in 2 * names
        ]
        answers = [reply for call in calls for reply in call.result()]
    assert [reply.text for reply in answers if reply.status_code != 200] == []
    assert len(answers) == 2 * len(names) * ANSWERS
    evicted = sum(shop.evictions(name, reason) for name in names for reason in ("room", "budget"))
    assert evicted > 0, "memory was short"
    wait_until(shop.no_demands, what="all demands are met")
    wait_until(lambda: shop.record.used_bytes <= BUDGET_BYTES, what="within the budget")


def test_models_that_are_called_without_a_pause_give_way_and_come_back(shop: Shop) -> None:
    """Three of them fill the memory. A fourth one is answered, and so is each call of the three."""
    known = Measured(resident_bytes=MODEL_BYTES, load_s=0.1)
    busy = [f"hog-{number}" for number in range(3)]
    for name in (*busy, "quiet"):
        shop.publish_known(name, KIND, known, bytes=MODEL_BYTES, load_s=0.1, run_s=0.01)
    shop.start()
    for name in busy:
        shop.until_known(name)
        shop.until_answers(name)
    request = v2.request({"x": ROW}, parameters=v2.PATIENT)
    with ExitStack() as loads:
        running = [
            loads.enter_context(constant_load(shop.stack.port, f"/v2/models/{name}/infer", [request], 6, pause_s=0))
            for name in busy
        ]
        for load in running:
            load.more(10)
        for _ in range(3):
            reply = shop.infer("quiet")
            assert reply.status_code == 200, reply.text
            for load in running:
                load.more(10)
    assert {answer.status for load in running for answer in load.answers} == {200}
    wait_until(shop.no_demands, what="all demands are met")


def test_a_call_that_cannot_be_loaded_in_time_is_told_when_to_come_again(shop: Shop) -> None:
    """What it is told is true: it finds its model, although another one waits for the memory."""
    large = Measured(resident_bytes=400 * MIB, load_s=3.0)
    shop.start()
    for name in ("slow-a", "slow-b"):
        shop.publish_known(name, KIND, large, bytes=large.resident_bytes, load_s=3.0)
        shop.until_known(name)
    missing = next(name for name in ("slow-a", "slow-b") if name not in shop.settled())
    for name in (missing, *({"slow-a", "slow-b"} - {missing})):
        reply = infer(shop, name, 1.0)
        assert reply.status_code == 429, reply.text
        told_s = int(reply.headers["retry-after"])
        assert 3 <= told_s <= 7
        time.sleep(told_s)
        reply = infer(shop, name, 1.0)
        assert reply.status_code == 200, reply.text


def test_a_load_that_hangs_holds_up_nobody_for_long(shop: Shop) -> None:
    shop.start()
    shop.publish("hangs", load_s=600.0, bytes=MIB)
    shop.publish("goes-on", bytes=MIB)
    for name in ("hangs", "goes-on"):
        shop.until_known(name)
    with ThreadPoolExecutor(1) as caller:
        hanging = caller.submit(infer, shop, "hangs", 15.0)
        reply = infer(shop, "goes-on", 60.0)
        assert reply.status_code == 200, reply.text
        assert hanging.result().status_code in {429, 503, 504}


def test_what_does_not_fit_beside_a_pinned_model_is_refused_at_once_with_the_reason(shop: Shop) -> None:
    pinned = shop.publish_known(
        "stays", KIND, Measured(resident_bytes=400 * MIB, load_s=0.1), bytes=400 * MIB, load_s=0.1
    )
    shop.start()
    shop.until_ready(pinned)
    shop.place(pinned, pin=True)
    shop.publish_known("too-much", KIND, Measured(resident_bytes=450 * MIB, load_s=0.1), bytes=450 * MIB, load_s=0.1)
    shop.until_known("too-much")
    reply = shop.infer("too-much")
    assert reply.status_code == 503, reply.text
    assert "it takes 450 MiB of memory" in reply.json()["error"]
    assert "pinned" in reply.json()["error"]
    assert int(reply.headers["retry-after"]) >= 1
    wait_until(shop.no_demands, what="its demand has ended")
