"""A version in two pools: its workers in the preferred one are killed, and the other answers. It costs no request."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.services.model.manifest import ModelConfig
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.footprints import Measured
from tests.kit import models, v2
from tests.kit.command_line import Millstream
from tests.kit.load import constant_load
from tests.kit.scale_model import BODIES, check_answers
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.versions import COPYING, publish_simulated
from tests.kit.wait import wait_until

INFER = "/v2/models/steady/infer"
KILLS = 2
FREEZES_MAX = 20
LEASE_S = 120  # of deaths the supervisor tells; a worker that this machine lets wait is not dead


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("pools")
    settings = {"queue_lease_s": LEASE_S}
    with running_stack(folder, gateways=2, pools="fast=1,slow=1", settings=settings) as stack:
        config = json.dumps({"pools": ["fast", "slow"]})
        stack.push("steady", models.scale(folder / "m.onnx"), config=config)
        yield stack


def ready_pools(stack: Stack) -> set[str]:
    """Return the pools that have the version ready, as both gateways know it."""
    known: list[set[str]] = []
    for index in range(stack.gateways):
        with stack.gateway(index) as gateway:
            instances = gateway.get("/admin/v1/models/steady/versions/1").json()["instances"]
            known.append({one["worker"].partition("-")[0] for one in instances if one["state"] == "ready"})
    return set.intersection(*known)


def answered_by(stack: Stack, pool: str) -> float:
    return stack.metrics().value("millstream_request_duration_seconds_count", model="steady", pool=pool)


def test_the_preferred_pool_answers_while_it_can(stack: Stack) -> None:
    fast, slow = answered_by(stack, "fast"), answered_by(stack, "slow")
    with constant_load(stack.port, INFER, BODIES) as load:
        load.more(200)
    check_answers(load)
    assert answered_by(stack, "fast") == fast + len(load.answers)
    assert answered_by(stack, "slow") == slow


def test_the_other_pool_answers_when_all_workers_of_the_preferred_one_are_killed(stack: Stack) -> None:
    with constant_load(stack.port, INFER, BODIES, callers=16) as load:
        for _ in range(KILLS):
            slow, before = answered_by(stack, "slow"), stack.pids()["fast-0"]
            os.kill(before, signal.SIGKILL)
            wait_until(lambda: answered_by(stack, "slow") > slow)  # noqa: B023
            wait_until(lambda: stack.pids().get("fast-0", before) != before)  # noqa: B023
            wait_until(lambda: ready_pools(stack) == {"fast", "slow"})
            fast = answered_by(stack, "fast")
            wait_until(lambda: answered_by(stack, "fast") > fast + 100)  # noqa: B023
    check_answers(load)
    total = sum(answered_by(stack, pool) for pool in ("fast", "slow"))
    assert stack.metrics().value("millstream_requests_total", model="steady", outcome="ok") == total


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose pools simulate models; at most four rows wait in a lane."""
    pools = "fast=1,backend=simulated,slow=1,backend=simulated,memory=512MiB"
    settings = {"queue_rows_max": 4, "queue_lease_s": LEASE_S}
    with running_stack(tmp_path_factory.mktemp("simulated"), pools=pools, settings=settings) as stack:
        yield stack


def publish(stack: Stack, name: str, behaviour: dict[str, float | str], *, alone: bool = False) -> None:
    """Publish a simulated model for both pools, or the preferred one alone; wait until its workers have it ready."""
    pools = ("fast",) if alone else ("fast", "slow")
    signature = COPYING.model_copy(update={"batching": False})
    config = ModelConfig(pools=pools, timeout_ms_default=100_000)
    publish_simulated(FolderRepository(stack.home / "repository"), name, behaviour, config=config, signature=signature)
    wait_until(lambda: ready_in(stack, name) == set(pools), what=f"{name} is ready")


def ready_in(stack: Stack, name: str) -> set[str]:
    reply = stack.http.get(f"/admin/v1/models/{name}/versions/1")
    instances = reply.json()["instances"] if reply.status_code == 200 else []
    return {one["worker"].partition("-")[0] for one in instances if one["state"] == "ready"}


def counted(stack: Stack, name: str, pool: str) -> float:
    return stack.metrics().value("millstream_request_duration_seconds_count", model=name, pool=pool)


DEADLY_ON_GPU = {"load": "crash", "load_on": "cuda"}


def test_a_version_that_kills_the_workers_of_one_kind_is_served_by_the_others(tmp_path: Path) -> None:
    pools = "gpu=1,backend=simulated,slow=1,backend=simulated"
    with running_stack(tmp_path, pools=pools) as stack:
        config = ModelConfig(pools=("gpu", "slow"))
        repository = FolderRepository(stack.home / "repository")
        manifest = publish_simulated(repository, "deadly", DEADLY_ON_GPU, config=config, signature=COPYING)

        def version() -> dict[str, Any]:
            found: dict[str, Any] = stack.http.get("/admin/v1/models/deadly/versions/1").json()
            return found

        wait_until(lambda: version().get("load_failures"), what="the GPU's workers refuse it")
        [failure] = version()["load_failures"]
        assert failure["kind"] == "simulated.cuda"
        assert "processes died while they loaded it" in failure["reason"]
        wait_until(lambda: ready_in(stack, "deadly") == {"slow"})
        assert version()["state"] == "ready"
        reply = stack.http.post("/v2/models/deadly/infer", content=BODY, headers=HEADERS)
        assert reply.status_code == 200, reply.text
        verdict = repository.verdicts.of(manifest)
        assert (verdict.on("simulated.cuda").deaths, verdict.on("simulated.cpu").deaths) == (2, 0)
        shown = Millstream(stack.home).ok("describe", "deadly")
        assert "on simulated.cuda" in shown


BODY, HEADERS = v2.request({"x": np.array([[1.0, 2, 3, 4]], np.float32)}, binary=False, parameters=v2.PATIENT)


def test_requests_that_a_full_pool_refuses_are_answered_by_the_next(simulated: Stack) -> None:
    publish(simulated, "busy", {"run_s": 0.5})
    # The first takes six or seven, which run or wait; the second could take as many.
    with sigstopped(simulated.pids()["fast-0"]):
        sent = [simulated.send("/v2/models/busy/infer", BODY, HEADERS) for _ in range(9)]
        wait_until(lambda: counted(simulated, "busy", "slow"), what="the second answers")
    statuses = [connection.getresponse().status for connection in sent]
    for connection in sent:
        connection.close()
    assert statuses == [200] * 9
    assert counted(simulated, "busy", "fast") + counted(simulated, "busy", "slow") == 9
    assert simulated.metrics().value("millstream_requests_overflowed_total", model="busy", pool="fast") > 0


def test_while_the_preferred_pool_loads_the_next_one_answers(simulated: Stack) -> None:
    publish(simulated, "heavy", {"load_s": 3.0})
    simulated.http.post("/v2/models/heavy/infer", content=BODY, headers=HEADERS)
    before = counted(simulated, "heavy", "slow")
    with frozen_while_it_loads(simulated, "heavy"):
        assert simulated.http.post("/v2/models/heavy/infer", content=BODY, headers=HEADERS).status_code == 200
        assert counted(simulated, "heavy", "slow") == before + 1
    wait_until(lambda: ready_in(simulated, "heavy") == {"fast", "slow"})
    back = counted(simulated, "heavy", "fast")

    def answers() -> bool:
        assert simulated.http.post("/v2/models/heavy/infer", content=BODY, headers=HEADERS).status_code == 200
        return counted(simulated, "heavy", "fast") > back

    wait_until(answers, what="the preferred pool answers again")


def worker_pids(stack: Stack) -> set[int]:
    return {one["pid"] for one in stack.http.get("/admin/v1/workers").json()["workers"]}


@contextmanager
def frozen_while_it_loads(stack: Stack, name: str) -> Iterator[None]:
    """Kill the worker of the preferred pool, and stop its successor before it has the version ready."""
    for _ in range(FREEZES_MAX):
        before = stack.pids()["fast-0"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: stack.pids().get("fast-0", before) != before, what="a successor")  # noqa: B023
        with sigstopped(stack.pids()["fast-0"]):
            wait_until(lambda: before not in worker_pids(stack), what="its death is known")  # noqa: B023
            if "fast" not in ready_in(stack, name):
                yield
                return
        wait_until(lambda: "fast" in ready_in(stack, name), what="it is ready")
    raise AssertionError(f"{name} was ready before its worker was stopped, {FREEZES_MAX} times")


def test_with_no_other_pool_requests_wait_for_the_next_worker(simulated: Stack) -> None:
    publish(simulated, "lonely", {"load_s": 1.0}, alone=True)
    pid = simulated.pids()["fast-0"]
    os.kill(pid, signal.SIGKILL)
    sent = [simulated.send("/v2/models/lonely/infer", BODY, HEADERS) for _ in range(4)]
    assert [connection.getresponse().status for connection in sent] == [200] * 4
    for connection in sent:
        connection.close()
    assert counted(simulated, "lonely", "slow") == 0


MIB = 1 << 20
SIZE_BYTES = 200 * MIB
CROWD = [f"crowd-{number}" for number in range(8)]


def test_what_the_preferred_pool_would_unload_called_models_for_the_next_pool_loads(tmp_path: Path) -> None:
    """The preferred pool has memory for two models, the next one for four, of which its worker preloads three.

    A model that neither had was loaded in the preferred pool, in place of one that was called, and then there again.
    """
    pools = "fast=1,backend=simulated,memory=650MiB,slow=1,backend=simulated,memory=1100MiB"
    with running_stack(tmp_path, pools=pools, settings={"queue_lease_s": LEASE_S}) as stack:
        repository = FolderRepository(stack.home / "repository")
        config = ModelConfig(pools=("fast", "slow"), timeout_ms_default=100_000)
        behaviour = {"bytes": SIZE_BYTES, "load_s": 0.2}

        def held(pool: str) -> set[str]:
            return {name for name in CROWD if pool in ready_in(stack, name)}

        def ask(name: str) -> None:
            reply = stack.http.post(f"/v2/models/{name}/infer", content=BODY, headers=HEADERS)
            assert reply.status_code == 200, reply.text

        known = Measured(resident_bytes=SIZE_BYTES, peak_bytes=0, load_s=0.2)
        for name in CROWD:  # their memory is known before a worker or a gateway sees them
            manifest = publish_simulated(FolderRepository(tmp_path / name), name, behaviour, 1, config, COPYING)
            (stack.home / "repository" / "models" / name).mkdir()
            repository.footprints.write(manifest, "simulated.cpu", known)
            published = publish_simulated(repository, name, behaviour, 1, config, COPYING)
            assert published.content_id == manifest.content_id
        wait_until(lambda: len(held("fast")) == 2 and len(held("slow")) == 3, what="both have preloaded")
        preferred = sorted(held("fast"))
        for name in preferred:
            ask(name)
            assert counted(stack, name, "fast") == 1
        cold = next(name for name in CROWD if name not in held("fast") | held("slow"))

        def is_shown() -> bool:
            """Whether the gateway's records say that both were called."""
            shown = stack.http.get("/admin/v1/placement").json()["workers"]
            return sum(one["last_used_age_s"] is not None for at in shown for one in at["instances"]) == 2

        wait_until(is_shown, what="the gateway knows the calls")
        ask(cold)
        assert (counted(stack, cold, "slow"), counted(stack, cold, "fast")) == (1, 0)
        assert sorted(held("fast")) == preferred
