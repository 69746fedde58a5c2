"""More models than memory, called while they change and every process dies or freezes in turn: no call is lost."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

from millstream.services.queue.keys import InstallationKeys
from tests.kit.churn import Churn
from tests.kit.controllers import controller_beside
from tests.kit.load import PAUSE_S
from tests.kit.metrics import Page
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.wait import wait_until

MODELS = 10
MODEL_BYTES = 24 << 20
OPERATIONS = 10  # each kind once
RIGHT_MIN = 100
LEASE_S = 5.0  # longer than a busy machine lets a worker wait now and then
FILE_BYTES_MAX = 4 << 20  # less than a model


class Faults:
    """What happens to the processes of a stack. Each fault ends before the next one begins."""

    def __init__(self, stack: Stack, controllers: list[int]) -> None:
        self._stack = stack
        self._controllers = controllers
        self._keys = InstallationKeys(stack.installation)

    def workers(self) -> list[int]:
        return [pid for name, pid in self._stack.pids().items() if name.startswith("cpu-")]

    def freeze_worker(self, _churn: Churn) -> None:
        """A worker freezes for longer than its lease, and goes on as if nothing had been."""
        known = self._live()
        pid = wait_until(self.workers, what="a worker")[0]
        with sigstopped(pid):
            wait_until(lambda: known - self._live(), what="its batches are taken over")

    def _live(self) -> set[bytes]:
        return set(self._stack.redis.zrange(self._keys.pool("cpu").workers, 0, -1))  # type: ignore[arg-type]

    def restart_redis(self, _churn: Churn) -> None:
        """Redis dies, and starts without its data."""
        pid = self._stack.pids()["redis"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self._stack.pids().get("redis", pid) != pid, what="Redis is back")

    def kill_gateway(self, churn: Churn) -> None:
        """Calls wait for loads in it, as in all gateways."""
        pid = self._stack.pids()["gateway-0"]
        with churn.gateway_dies():
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: self._stack.pids().get("gateway-0", pid) != pid, what="the gateway is back")

    def pause_controllers(self, _churn: Churn) -> None:
        """Each controller is paused for longer than its lead: the other one leads, whichever it was before."""
        for pid in self._controllers:
            with sigstopped(pid):
                self._stack.redis.delete(self._keys.leader)  # as if its life had passed
                wait_until(lambda: self._stack.redis.exists(self._keys.leader), what="the other one leads")

    def fill_disk(self, churn: Churn) -> None:
        """The gateways can write no file of the size of a model."""
        gateways = [pid for name, pid in self._stack.pids().items() if name.startswith("gateway-")]
        try:
            for pid in gateways:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, resource.RLIM_INFINITY))
            churn.push_without_room()
        finally:
            for pid in gateways:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_no_call_is_lost_whatever_happens_to_models_and_processes(tmp_path: Path) -> None:
    # Two workers with memory for the interpreter and about five of ten models each.
    settings = {"worker_memory": "320MiB", "queue_lease_s": LEASE_S}
    with (
        running_stack(tmp_path, gateways=2, pools="cpu=2", settings=settings) as stack,
        controller_beside(stack) as first,
        controller_beside(stack) as second,
    ):
        faults = Faults(stack, [first.pid, second.pid])
        kinds = [
            faults.freeze_worker,
            faults.restart_redis,
            faults.kill_gateway,
            faults.pause_controllers,
            faults.fill_disk,
        ]
        churn = Churn(stack.url, stack.headers, tmp_path, MODELS, MODEL_BYTES, faults.workers, seed=13, faults=kinds)
        churn.upload()
        churn.start(callers=6, pause_s=PAUSE_S)
        try:
            churn.operate(OPERATIONS)
            wait_until(lambda: churn.counts["right"] > RIGHT_MIN or churn.lost, what="enough right answers")
        finally:
            churn.stop()
        assert not churn.lost, (churn.lost, churn.counts, churn.operations)
        stack.reconnect()
        print(churn.counts, churn.operations)
        placed = stack.http.get("/admin/v1/placement").json()
        for worker in placed["workers"]:
            assert len(worker["instances"]) < MODELS  # else memory was not short
        _check_metrics(stack)


def _check_metrics(stack: Stack) -> None:

    def metrics_of_all() -> Page | None:
        """A worker that was killed last publishes its memory with its first heartbeat."""
        page = Page(stack.http.get("/metrics").text)
        used = [page.value("millstream_worker_memory_used_bytes", worker=worker) for worker in ("cpu-0", "cpu-1")]
        return page if all(used) else None

    metrics = wait_until(metrics_of_all, what="both workers have published what they use")
    assert metrics.value("millstream_evictions_total") > 0
    wait_until(
        lambda: Page(stack.http.get("/metrics").text).value("millstream_model_unload_duration_seconds_count") > 0
    )
    assert metrics.value("millstream_cold_requests_total") > 0
    assert metrics.value("millstream_model_cache_misses_total") > 0
    assert metrics.value("millstream_model_cache_hits_total") > 0
    requests = metrics.value("millstream_requests_total")
    assert sum(metrics.value(f"millstream_model_cache_{what}_total") for what in ("hits", "misses")) >= requests
    for worker in ("cpu-0", "cpu-1"):
        budget = metrics.value("millstream_worker_memory_budget_bytes", worker=worker)
        assert 0 < metrics.value("millstream_worker_memory_used_bytes", worker=worker) <= budget
        assert metrics.value("millstream_worker_instances", worker=worker) < MODELS
