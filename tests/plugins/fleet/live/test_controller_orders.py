"""What the controller does to real workers with memory for three models of six: minimum, copies, idle, prefetch.

Models are those of the simulated backend, which claim their bytes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np
import pytest

from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.placement.usage import Usage
from millstream.services.queue.keys import InstallationKeys
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.orders import Order
from tests.kit import v2
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.versions import COPYING, publish_content, publish_simulated
from tests.kit.wait import wait_until

MIB = 1 << 20
MODEL_BYTES = 200 * MIB
MODELS = ("a", "b", "c", "d", "e", "f")
POOLS = "sim=2,backend=simulated,memory=800MiB"
ROW = np.ones((1, 4), np.float32)
WAIT_S = 120
_MILLSTREAM = (sys.executable, "-P", "-m", "millstream.services.cli")


class Fleet:
    """A running stack with a controller and two workers with the simulated backend."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.repository = FolderRepository(stack.home / "repository")
        self.keys = InstallationKeys(stack.installation).pool("sim")

    def publish(self, name: str, instances_max: int = 0, **behaviour: Any) -> Manifest:
        behaviour.setdefault("bytes", MODEL_BYTES)
        config = ModelConfig(pools=("sim",), instances_max=instances_max)
        manifest = publish_simulated(self.repository, name, behaviour, config=config)
        wait_until(lambda: self.is_known(name), what=f"{name} is known")
        return manifest

    def is_known(self, name: str) -> bool:
        """Whether a model is ready or on standby."""
        reply = self.stack.http.get(f"/admin/v1/models/{name}/versions/1")
        return reply.status_code == 200 and reply.json()["state"] in {"ready", "standby"}

    def placement(self, name: str | None = None) -> dict[str, Any]:
        found: dict[str, Any] = self.stack.http.get(
            "/admin/v1/placement", params={"model": name} if name else {}
        ).json()
        return found

    def holders(self, name: str, state: str = "ready") -> list[dict[str, Any]]:
        """The instances of a model in a state, each with the id of its worker."""
        return [
            one | {"worker": worker["id"]}
            for worker in self.placement(name)["workers"]
            for one in worker["instances"]
            if one["state"] == state
        ]

    def until_held(self, name: str, number: int) -> list[dict[str, Any]]:
        """Wait until so many workers have a model ready, and none loads or unloads it."""

        def held() -> list[dict[str, Any]] | None:
            all_of = [one for worker in self.placement(name)["workers"] for one in worker["instances"]]
            ready = self.holders(name)
            return ready or [{}] if len(ready) == len(all_of) == number else None

        return wait_until(held, WAIT_S, f"{name} in {number} workers")

    def configure(self, name: str, **settings: Any) -> None:
        def configured() -> bool:
            """On a busy machine the lead of the controller may end for a moment, of which the reply warns."""
            reply = self.stack.http.patch(f"/admin/v1/models/{name}", json=settings)
            assert reply.status_code == 200, reply.text
            return bool(reply.json()["warnings"] == [])

        wait_until(configured, WAIT_S, "a controller runs")

    def call(self, name: str) -> None:
        """Call a model until it answers: it is refused while all others are too young to be unloaded for it."""
        body, headers = v2.request({"x": ROW}, parameters={"timeout": WAIT_S * 1_000_000})

        def answered() -> bool:
            reply = self.stack.http.post(f"/v2/models/{name}/infer", content=body, headers=headers)
            assert reply.status_code == 200 or "retry-after" in reply.headers, reply.text
            return reply.status_code == 200

        wait_until(answered, WAIT_S, f"{name} answers")

    def order(self, worker: str, order: Order) -> None:
        self.stack.redis.rpush(self.keys.orders(worker), order.model_dump_json())

    def leader_token(self) -> int:
        """The fencing token of the controller that leads."""
        keys = InstallationKeys(self.stack.installation)
        lead: Any = wait_until(lambda: self.stack.redis.get(keys.leader), WAIT_S, "a controller leads")
        return int(lead.split()[0])

    def orders_waiting(self) -> bool:
        """Whether a worker has not taken an order yet."""
        return any(self.stack.redis.exists(self.keys.orders(one["id"])) for one in self.placement()["workers"])

    def rounds(self) -> float:
        return self.stack.metrics().value("millstream_controller_round_duration_seconds_count")

    def orders_of(self, do: str, reason: str) -> float:
        """How many orders controllers gave for a reason."""
        return self.stack.metrics().value("millstream_controller_orders_total", order=do, reason=reason)

    @contextmanager
    def called(self, name: str, callers: int) -> Iterator[None]:
        """Call a model without a pause while the block runs."""
        stopping = threading.Event()

        def work() -> None:
            while not stopping.is_set():
                self.call(name)

        threads = [threading.Thread(target=work) for _ in range(callers)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stopping.set()
            for thread in threads:
                thread.join()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_stack(tmp_path_factory.mktemp("orders"), pools=POOLS, controller=True) as stack:
        fleet = Fleet(stack)
        for name in MODELS:
            fleet.publish(name)
        wait_until(lambda: stack.metrics().value("millstream_controller_leads") == 1, what="leads")
        yield fleet


def test_the_minimum_is_loaded_and_held_after_the_death_of_a_worker(fleet):
    fleet.configure("a", instances_min=2)
    fleet.until_held("a", 2)
    fleet.configure("a", instances_min=1)
    worker = fleet.holders("a")[0]["worker"]
    os.kill(fleet.stack.pids()[worker.rpartition("-")[0]], signal.SIGKILL)
    wait_until(lambda: worker not in [one["id"] for one in fleet.placement()["workers"]], what="gone")
    wait_until(lambda: fleet.holders("a"), WAIT_S, "held")
    wait_until(lambda: len(fleet.placement()["workers"]) == 2, what="both are back")
    fleet.configure("a", instances_min=0)


def test_the_minimum_of_a_version_that_was_never_measured_is_tried_with_the_memory_that_others_leave(fleet):
    fleet.configure("a", instances_min=2)
    fleet.until_held("a", 2)
    # Its prediction is all memory for models, because its file is large; it takes what the others leave.
    content = json.dumps({"bytes": MIB}).encode() + b" " * (100 * MIB)
    config = ModelConfig(pools=("sim",))
    publish_content(fleet.repository, "large-file", content, "simulated", COPYING, config)
    wait_until(lambda: fleet.is_known("large-file"), what="it is known")
    before = fleet.orders_of("load", "minimum")
    assert fleet.placement("large-file")["models"][0]["standby"], "no worker loads it by itself"
    fleet.configure("large-file", instances_min=1)
    [one] = fleet.until_held("large-file", 1)
    assert one["why"] == "instance 1 of the 1 that are always loaded"
    assert fleet.orders_of("load", "minimum") > before
    assert len(fleet.holders("a")) == 2
    fleet.repository.delete_model("large-file")
    fleet.configure("a", instances_min=0)


def test_idle_versions_are_unloaded_and_answer_again(fleet):
    fleet.call("b")
    fleet.configure("b", idle_s=1)
    fleet.until_held("b", 0)
    wait_until(lambda: fleet.stack.metrics().value("millstream_evictions_total", model="b", reason="idle") > 0)
    assert wait_until(lambda: fleet.placement("b")["models"][0]["standby"], what="on standby")
    fleet.configure("b", idle_s=0)
    fleet.call("b")


def test_calls_that_keep_one_instance_busy_get_another(fleet):
    busy = fleet.publish("busy", run_s=0.2, bytes=MIB)  # far longer than all else that a call takes
    fleet.call("busy")
    for one in fleet.holders("busy")[1:]:  # as if it had been called once
        fleet.order(one["worker"], Order(do="unload", content_id=busy.content_id, why="a test"))
    before = fleet.orders_of("load", "load")
    with fleet.called("busy", 4):
        wait_until(
            lambda: fleet.orders_of("load", "load") > before or len(fleet.holders("busy")) == 2, WAIT_S, "ordered"
        )
        wait_until(lambda: len(fleet.holders("busy")) == 2, WAIT_S, "two instances")


def test_what_is_called_like_clockwork_is_loaded_before_its_call(fleet):
    # One instance: otherwise another copy may be loaded for its regular calls.
    clock = fleet.publish("clock", instances_max=1, bytes=MIB)
    usage = reduce(Usage.with_gap, (57.0, 63.0) * 10, Usage()).pack()
    order = Order(do="load", content_id=clock.content_id, why="a test", evict=True, usage=usage)
    worker = min(worker["id"] for worker in fleet.placement()["workers"])  # the one that may load it by itself
    fleet.order(worker, order)
    wait_until(lambda: not fleet.orders_waiting(), WAIT_S, "its usage is known")
    fleet.until_held("clock", 1)
    fleet.call("clock")
    wait_until(lambda: any(one["last_used_age_s"] is not None for one in fleet.holders("clock")), what="published")
    rounds = fleet.rounds()
    wait_until(lambda: fleet.rounds() > rounds + 1, what="the controller has seen it")
    before = fleet.orders_of("load", "prefetch")

    def expected() -> bool:
        """Unload it, until it is loaded for the call that is due a minute after the one above."""
        holders = fleet.holders("clock")
        if any("a call is expected in" in one["why"] for one in holders):
            return True
        if not fleet.orders_waiting():
            for one in holders:
                fleet.order(one["worker"], Order(do="unload", content_id=clock.content_id, why="a test"))
        return False

    wait_until(expected, WAIT_S, "loaded")
    assert fleet.orders_of("load", "prefetch") > before


def test_orders_of_an_earlier_leader_are_ignored(fleet):
    worker = fleet.placement()["workers"][0]["id"]
    idle, asked = (fleet.repository.manifest(name, 1).content_id for name in ("e", "d"))
    token = fleet.leader_token()
    fleet.order(worker, Order(do="unload", content_id=idle, why="of the leader", token=token))
    fleet.order(worker, Order(do="load", content_id=asked, why="a leader that slept", token=token - 1))
    wait_until(lambda: "is ignored: its controller was replaced" in fleet.stack.logs(), what="ignored")
    assert "a leader that slept" not in [one["why"] for one in fleet.holders("d")]


def test_everything_serves_on_without_a_controller(fleet):
    with sigstopped(fleet.stack.process.pid):  # the supervisor, in which the controller runs
        wait_until(lambda: fleet.placement()["leader"] is None, what="no leader")
        for name in MODELS:
            fleet.call(name)
        reply = fleet.stack.http.patch("/admin/v1/models/e", json={"instances_min": 1})
        assert reply.json()["warnings"] == [
            "no controller runs: instances_min and idle_s have no effect until one does"
        ]
    wait_until(lambda: fleet.placement()["leader"], what="it leads again")
    wait_until(lambda: fleet.holders("e"), WAIT_S, "held")
    fleet.configure("e", instances_min=0)


def test_a_rolling_restart_moves_what_its_worker_holds(fleet):
    for name in ("d", "e", "f"):
        fleet.call(name)

    def held() -> set[str]:
        """In one document: of several, one might have what the other's load has unloaded."""
        instances = [one for worker in fleet.placement()["workers"] for one in worker["instances"]]
        ready = {one["model"] for one in instances if one["state"] == "ready"}
        return ready if {"d", "e", "f"} <= ready else set()

    before = wait_until(held, WAIT_S, "they are loaded together")
    done = subprocess.run(
        [*_MILLSTREAM, "restart", "workers", "--home", str(fleet.stack.home)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wait_until(lambda: all(fleet.holders(name) for name in before), WAIT_S, "the new workers hold the same")
