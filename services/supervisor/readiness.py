"""Waits until a replacement can take over: a gateway signals readiness, a worker has what the old one has.

What a new worker does not load by itself, because not all versions of its pool fit into its memory, it is ordered to
load: the calls that the old worker answered find their versions loaded in the new one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress

from millstream.services.errors import Code, Failure
from millstream.services.placement.views import RefusalKind
from millstream.services.process.waits import with_jitter
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.url import RedisAddress
from millstream.services.supervisor.child import Child
from millstream.services.wire.orders import Order
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord

POLL_S = 0.1
GATEWAY_S_MAX = 60.0
ORDERS_MAX = 4  # that a new worker has not begun
LOAD_S_MAX = 300.0  # longest wait for the next version to be loaded and warmed up


async def wait_until_ready(old: Child, new: Child, address: RedisAddress, keys: InstallationKeys) -> None:
    """Return when `new` can replace `old`. Raises Failure with the reason if it cannot."""
    if not new.program.worker:
        try:
            async with asyncio.timeout(GATEWAY_S_MAX):
                await new.ready.wait()
        except TimeoutError as error:
            raise Failure(Code.UNAVAILABLE, f"it is not ready after {GATEWAY_S_MAX:g} s") from error
        return
    cluster_state = ClusterState(address, keys)
    try:
        await _until_loaded(old, new, cluster_state)
    finally:
        await cluster_state.close()


async def wait_until_loaded(
    workers: Callable[[], Iterable[Child]], address: RedisAddress, keys: InstallationKeys
) -> None:
    """Return when all of some workers, as they are started again, have loaded what they should hold."""
    cluster_state = ClusterState(address, keys)
    try:
        while not {child.worker for child in workers()} <= {
            one.id for one in await _records(cluster_state) if one.ready
        }:
            await asyncio.sleep(with_jitter(POLL_S))
    finally:
        await cluster_state.close()


async def _until_loaded(old: Child, new: Child, cluster_state: ClusterState) -> None:
    previous: frozenset[str] | None = None
    since = time.monotonic()
    ordered: set[str] = set()
    settled: set[str] = set()  # that the new worker had ready once, or found no memory for
    while True:
        records = await _records(cluster_state)
        missing = missing_versions(records, old.worker, new.worker)
        if missing is not None:
            settled |= {one.content_id for one in _instances(records, old.worker)} - missing
            missing -= settled
            if not missing:
                return
        for instance in unordered(records, old.worker, new.worker, missing or frozenset(), ordered):
            if await _order(cluster_state, records, new.worker, instance):
                ordered.add(instance.content_id)
        if missing != previous:
            previous, since = missing, time.monotonic()
        elif time.monotonic() > since + LOAD_S_MAX:
            what = f" {len(missing)} versions ({min(missing)})" if missing else ""
            raise Failure(Code.UNAVAILABLE, f"after {LOAD_S_MAX:g} s it has not loaded{what}")
        await asyncio.sleep(with_jitter(POLL_S))


def unordered(
    workers: Sequence[WorkerRecord], old: str, new: str, missing: frozenset[str], ordered: AbstractSet[str]
) -> list[InstanceRecord]:
    """Return the instances of worker `old` that worker `new` is to be ordered to load now.

    Those are `missing` and not begun by itself. If there are any, what it has ready already is ordered first, so that
    it does not unload that for them: it knows of no calls yet.
    """
    record = next((worker for worker in workers if worker.id == new), None)
    if record is None or not record.token:  # it has not decided yet what it loads by itself
        return []
    begun = {instance.content_id: instance.state for instance in record.instances}
    lacking = missing - begun.keys()
    waiting = len(lacking & ordered)
    instances = [one for one in _instances(workers, old) if one.content_id not in ordered]
    new_orders = [one for one in instances if one.content_id in lacking][: max(0, ORDERS_MAX - waiting)]
    if not new_orders:
        return []
    return [one for one in instances if begun.get(one.content_id) is State.READY] + new_orders


def _instances(workers: Sequence[WorkerRecord], worker: str) -> list[InstanceRecord]:
    """Return the instances that a worker can run, by content id."""
    found = next((record.instances for record in workers if record.id == worker), ())
    return sorted((one for one in found if one.state is State.READY), key=lambda one: one.content_id)


async def _order(
    cluster_state: ClusterState, workers: Sequence[WorkerRecord], new: str, instance: InstanceRecord
) -> bool:
    pool = next(worker.pool for worker in workers if worker.id == new)
    order = Order(
        do="load",
        content_id=instance.content_id,
        why="the worker that had it is replaced",
        evict=True,
        usage=instance.usage,
    )
    with suppress(Failure):  # Redis is unavailable: try again
        return await cluster_state.order(pool, new, order)
    return False


async def _records(cluster_state: ClusterState) -> Sequence[WorkerRecord]:
    try:
        return await cluster_state.workers()
    except Failure:
        return ()  # Redis is unavailable: try again until the time limit


def missing_versions(workers: Sequence[WorkerRecord], old: str, new: str) -> frozenset[str] | None:
    """Return the content ids that worker `old` can run and `new` cannot yet; None if `new` has no record yet.

    Versions for which `new` finds no memory are not among them: their next call decides what makes room. Raises
    Failure(MODEL) with the reason for a version that `new` failed to load.
    """
    records = {worker.id: worker for worker in workers}
    if new not in records:
        return None
    instances = {instance.content_id: instance for instance in records[new].instances}
    ready = {content_id for content_id, instance in instances.items() if instance.state is State.READY}
    refused = {refusal.content_id for refusal in records[new].refusals if refusal.kind != RefusalKind.FAILED}
    can_run = frozenset(instance.content_id for instance in _instances(workers, old))
    missing = can_run - ready - refused
    for content_id in sorted(missing & instances.keys()):
        failed = instances[content_id]
        if failed.state is State.FAILED:
            raise Failure(Code.MODEL, f"version {failed.version} of {failed.model} failed: {failed.reason}")
    for refusal in records[new].refusals:
        if refusal.content_id in missing:
            raise Failure(Code.MODEL, f"{refusal.content_id} failed: {refusal.reason}")
    return missing
