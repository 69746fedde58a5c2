"""Loads that fail, crash, never end or find no memory, as callers see them: the reason, a time to retry, and no harm.

One stack with a simulated pool; its worker has memory for two models of 150 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.queue.keys import InstallationKeys
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.orders import Order
from millstream.services.wire.records import WorkerRecord
from millstream.workers.residency.version_loads import FAILED_OFTEN_RETRY_S, FAILED_RETRY_S
from tests.kit import v2
from tests.kit.load import constant_load
from tests.kit.stack import Stack, running_stack
from tests.kit.versions import publish_simulated
from tests.kit.wait import wait_until

MIB = 1 << 20
MODEL_BYTES = 150 * MIB
POOLS = "sim=1,backend=simulated,memory=480MiB"
LOAD_S_MAX = 8
REQUEST = v2.request({"x": np.ones((1, 4), np.float32)}, parameters={"timeout": 110_000_000})  # microseconds


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"worker_load_s_max": LOAD_S_MAX}
    with running_stack(tmp_path_factory.mktemp("failures"), pools=POOLS, settings=settings) as stack:
        publish(stack, "neighbour")
        until(stack, "neighbour", 200)
        yield stack


def publish(stack: Stack, name: str, **behaviour: Any) -> None:
    repository = FolderRepository(stack.home / "repository")
    publish_simulated(repository, name, behaviour, config=ModelConfig(pools=("sim",)))
    wait_until(lambda: stack.http.get(f"/v2/models/{name}").status_code == 200, what=f"{name} is known")


def publish_damaged(stack: Stack, name: str, folder: Path) -> Manifest:
    """Publish a version whose file is not the one that its manifest names; `mend` restores it."""
    manifest = publish_simulated(FolderRepository(folder), name, {}, config=ModelConfig(pools=("sim",)))
    repository = FolderRepository(stack.home / "repository")
    with repository.open_staging() as staging:
        (staging.path / "source").mkdir()
        (staging.path / manifest.served).write_bytes(b"damaged")
        repository.publish(staging, manifest, activate=True)
    return manifest


def mend(stack: Stack, manifest: Manifest) -> None:
    (FolderRepository(stack.home / "repository").folder_of(manifest) / manifest.served).write_text("{}")


def order(stack: Stack, manifest: Manifest) -> None:
    """Order the worker to load a version, as the controller does."""
    [worker] = [one["id"] for one in stack.http.get("/admin/v1/workers").json()["workers"]]
    order = Order(do="load", content_id=manifest.content_id, why="its instances_min", token=1)
    stack.redis.rpush(InstallationKeys(stack.installation).pool("sim").orders(worker), order.model_dump_json())


def call(stack: Stack, name: str) -> httpx2.Response:
    body, headers = REQUEST
    return stack.http.post(f"/v2/models/{name}/infer", content=body, headers=headers)


def replied(stack: Stack, name: str, status: int) -> httpx2.Response | None:
    """Call a model; a refusal has a time to try again. One that was just published may be known before it is active."""
    reply = call(stack, name)
    assert reply.status_code in {200, 404} or "retry-after" in reply.headers, (reply.status_code, reply.text)
    return reply if reply.status_code == status else None


def until(stack: Stack, name: str, status: int) -> httpx2.Response:
    return wait_until(partial(replied, stack, name, status), what=f"{name} answers {status}")


def state(stack: Stack, name: str) -> str:
    return str(stack.http.get(f"/admin/v1/models/{name}/versions/1").json().get("state"))


def delete(stack: Stack, *names: str) -> None:
    for name in names:
        assert stack.http.delete(f"/admin/v1/models/{name}").status_code == 204


def log(stack: Stack) -> str:
    return (stack.home / "logs" / "sim-0.log").read_text()


def test_three_failed_loads_are_refused_until_an_operator_has_them_tried_again(stack: Stack, tmp_path: Path) -> None:
    manifest = publish_damaged(stack, "broken", tmp_path)
    wait_until(lambda: state(stack, "broken") == "failed", what="it is failed")
    for tries in (1, 2, 3):
        wait_until(partial(has_failed, stack, "broken", tries), what=f"{tries} loads failed")
        order(stack, manifest)
    wait_until(lambda: "its load failed 3 times: damaged: " in log(stack), what="it is refused")

    def refused() -> bool:
        """Whether the gateway knows of the last failure, and when the worker tries the version again."""
        reply = until(stack, "broken", 503)
        assert "is not the file that was uploaded" in reply.json()["error"]
        return FAILED_RETRY_S < int(reply.headers["retry-after"]) <= FAILED_OFTEN_RETRY_S + 1

    wait_until(refused, what="the time at which its worker tries it is told")
    assert log(stack).count("loading: broken ") == 3

    reply = stack.http.post("/v2/repository/models/broken/load")  # still damaged
    assert (reply.status_code, "is not the file that was uploaded" in reply.text) == (400, True), reply.text
    mend(stack, manifest)
    reply = stack.http.post("/v2/repository/models/broken/load")
    assert reply.status_code == 200, reply.text
    until(stack, "broken", 200)
    until(stack, "neighbour", 200)
    delete(stack, "broken")


def follows_repository(stack: Stack) -> bool:
    keys = InstallationKeys(stack.installation).pool("sim")
    [worker] = [one["id"] for one in stack.http.get("/admin/v1/workers").json()["workers"]]
    record = WorkerRecord.model_validate_json(str(stack.redis.get(keys.record(worker)), "utf-8"))  # type: ignore[arg-type]
    return record.token == FolderRepository(stack.home / "repository").token()


def has_failed(stack: Stack, name: str, times: int) -> bool:
    return log(stack).count(f"failed: {name} ") >= times


@pytest.mark.parametrize(
    ("how", "reason"),
    [("crash", "processes died while they loaded it"), ("hang", f"loading took longer than {LOAD_S_MAX} s")],
)
def test_a_load_that_crashes_or_never_ends_is_refused_with_the_reason(stack: Stack, how: str, reason: str) -> None:
    name = f"deadly-{how}"
    publish(stack, name, load=how)
    wait_until(lambda: state(stack, name) == "failed", what="it is failed")
    assert reason in until(stack, name, 503).json()["error"]
    until(stack, "neighbour", 200)
    delete(stack, name)


def test_a_load_by_tritons_api_makes_room_or_is_refused_with_the_reason(stack: Stack) -> None:
    names = ("room-1", "room-2", "room-3")
    for name in names:
        publish(stack, name, bytes=MODEL_BYTES)
    for name in names:
        until(stack, name, 200)  # now it is known what they take

    def on_standby() -> str | None:
        """The one that was unloaded for the last one: for a moment it is none."""
        return next((name for name in names if state(stack, name) == "standby"), None)

    cold = wait_until(on_standby, what="one of them is on standby")

    def loaded() -> bool:
        """It is refused while all others are too young to be unloaded."""
        reply = stack.http.post(f"/v2/repository/models/{cold}/load")
        assert reply.status_code == 200 or "retry-after" in reply.headers, reply.text
        return reply.status_code == 200 and state(stack, cold) == "ready"

    wait_until(loaded, what="another one was unloaded for it")
    cold = wait_until(on_standby, what="another one is on standby")
    held = [name for name in names if name != cold]
    for name in held:
        assert stack.http.patch(f"/admin/v1/models/{name}", json={"pin": True}).status_code == 200
    wait_until(partial(follows_repository, stack), what="the worker knows that they are pinned")
    with constant_load(stack.port, f"/v2/models/{held[0]}/infer", [REQUEST], callers=1) as load:
        reply = stack.http.post(f"/v2/repository/models/{cold}/load")
        assert reply.status_code == 503, reply.text
        assert "pinned" in reply.json()["error"]
        assert state(stack, cold) == "standby"
        load.more(5)
    assert {answer.status for answer in load.answers} == {200}
    refused = until(stack, cold, 503)
    assert "pinned" in refused.json()["error"]
    delete(stack, *names)


def test_a_load_that_found_no_memory_is_tried_again_with_what_it_takes(stack: Stack) -> None:
    """The prediction for the second one is far too low: its load finds no memory, and others are unloaded for it."""
    publish(stack, "holds", bytes=2 * MODEL_BYTES, allocate=True)
    until(stack, "holds", 200)
    publish(stack, "wants", bytes=2 * MODEL_BYTES, allocate=True)
    until(stack, "wants", 200)
    wait_until(lambda: state(stack, "holds") == "standby", what="it made room")
    until(stack, "holds", 200)
    until(stack, "neighbour", 200)
    delete(stack, "holds", "wants")
