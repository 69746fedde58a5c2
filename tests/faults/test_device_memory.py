"""Memory of an accelerator: a second budget that loads, unloads, refusals and what operators see respect.

Workers are real; the simulated backend claims the bytes of a device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import pytest

from millstream.services.repository.footprints import Measured
from tests.kit.command_line import Millstream
from tests.kit.shop import LEASE_S, MIB, Shop
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

DEVICE_BYTES = 1000 * MIB


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("device"), settings={"queue_lease_s": LEASE_S}) as stack:
        yield stack


@pytest.fixture
def shop(stack: Stack, request: pytest.FixtureRequest) -> Iterator[Shop]:
    shop = Shop(stack, request.node.name.removeprefix("test_").replace("_", "-")[:30])
    shop.start(pools=f"{shop.pool}=1,device=cuda:0,device_memory={DEVICE_BYTES >> 20}MiB")
    try:
        yield shop
    finally:
        shop.close()


def test_the_device_is_full_although_the_host_is_not(shop: Shop) -> None:
    small = [shop.publish(f"on-device-{at}", bytes=MIB, device_bytes=300 * MIB) for at in range(4)]
    shop.settled()  # what is unloaded for an order would disturb the measurement of a load
    for manifest in small:
        shop.load(manifest)
        wait_until(lambda: shop.record.device_used_bytes <= DEVICE_BYTES, what="within the budget of the device")
    wait_until(lambda: len(shop.settled()) == 3, what="three fit")
    record = shop.record
    assert record.device_budget_bytes == DEVICE_BYTES
    assert record.used_bytes < record.budget_bytes / 2
    instance = shop.instance(small[-1])
    assert instance is not None
    assert instance.device_resident_bytes // MIB == 300, "measured, or predicted from the others"
    shop.until_known("on-device-0")
    shop.until_answers("on-device-0")
    wait_until(lambda: len(shop.settled()) == 3, what="three fit")

    def metric(name: str) -> float:
        return shop.stack.metrics().value(f"millstream_worker_device_memory_{name}", pool=shop.pool)

    wait_until(lambda: metric("budget_bytes") == DEVICE_BYTES and metric("used_bytes") > 600 * MIB, what="published")
    workers = shop.stack.http.get("/admin/v1/placement").json()["workers"]
    [worker] = [one for one in workers if one["pool"] == shop.pool]
    assert worker["device_budget_bytes"] == DEVICE_BYTES
    assert worker["device_free_bytes"] == DEVICE_BYTES - worker["device_used_bytes"]
    assert {one["device_size_bytes"] // MIB for one in worker["instances"]} <= {0, 300}

    def shows_all() -> bool:
        """The gateway may not know of the last load yet."""
        done = Millstream(shop.stack.home).run("placement", "--endpoint", f"http://127.0.0.1:{shop.stack.port}")
        assert done.returncode == 0, done.stderr
        return bool(re.search(r", device \S+ \S+ of 1000\.0 MiB, 3 versions", done.stdout))

    wait_until(shows_all, what="operators see them")


def test_a_peak_on_the_device_counts_until_the_instance_goes(shop: Shop) -> None:
    peaked = shop.publish("peaked", bytes=MIB, device_bytes=100 * MIB, device_peak_bytes=200 * MIB)
    shop.until_ready(peaked)
    instance = shop.instance(peaked)
    assert instance is not None
    assert (instance.device_resident_bytes, instance.device_peak_bytes) == (100 * MIB, 200 * MIB)
    wait_until(lambda: shop.record.device_used_bytes == 300 * MIB, what="its peak counts")
    stored = partial(shop.repository.footprints.measured, peaked, "simulated.cuda")
    measured = wait_until(stored, what="it is stored, after it is published")
    assert (measured.device_resident_bytes, measured.device_peak_bytes) == (100 * MIB, 200 * MIB)


def test_two_with_large_peaks_go_where_one_alone_frees_little(shop: Shop) -> None:
    """A worker counts the largest peak alone: one of two with equal peaks frees none of it, both free it."""
    behaviour = {"bytes": MIB, "device_bytes": 40 * MIB, "device_peak_bytes": 250 * MIB}
    two = [shop.publish(name, **behaviour) for name in ("peak-1", "peak-2")]
    for manifest in two:
        shop.load(manifest)
    wait_until(lambda: shop.record.device_used_bytes == 330 * MIB, what="both are there")
    need = DEVICE_BYTES - 330 * MIB + 100 * MIB
    known = Measured(resident_bytes=MIB, load_s=0.01, device_resident_bytes=need)
    large = shop.publish_known("large", "simulated.cuda", known, bytes=MIB, device_bytes=need)
    shop.load(large)
    wait_until(lambda: shop.settled() == {"large"}, what="it alone is there")
    wait_until(lambda: shop.log.count(f"to make room for {large.content_id}") == len(two), what="both made room")


def test_a_refusal_names_the_memory_that_is_short(shop: Shop) -> None:
    huge = shop.publish("huge-on-device", bytes=MIB, device_bytes=2 * DEVICE_BYTES)
    wait_until(lambda: shop.instance(huge), what="it was tried")
    shop.until_known("huge-on-device")

    def refused() -> str:
        reply = shop.infer("huge-on-device")
        error: str = reply.json()["error"] if reply.status_code == 503 else ""
        return error if "of device memory" in error else ""

    error = wait_until(refused, what="it is refused")
    assert f"it takes {2 * DEVICE_BYTES // MIB} MiB of device memory" in error, error
    assert f"{DEVICE_BYTES // MIB} MiB" in error, "the other number"
    wait_until(lambda: shop.record.device_used_bytes == 0, what="its memory is free")
