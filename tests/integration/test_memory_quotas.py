"""Memory quotas of keys: two workers, a tenant with a quota and a neighbour without one, real models and calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from millstream import Client, ServerError
from tests.kit import models
from tests.kit.command_line import Millstream
from tests.kit.stack import WAIT_S, Stack, assert_quiet, running_stack
from tests.kit.wait import wait_until

ADMIN = "the-admin-key-of-this-test"
MIB = 1 << 20
MODEL = 48 * MIB
QUOTA = 230 * MIB  # two instances: each is measured as some 100 MiB, with the peak of its runs
NAMES = [f"tenant-{name}" for name in "abcd"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("quotas")
    path = models.heavy(folder / "heavy.onnx", MODEL)
    with running_stack(folder, pools="cpu=2", settings={"admin_key": ADMIN}, models={"neighbour": path}) as stack:
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    yield served
    assert_quiet(served)


@pytest.fixture(scope="module")
def tenant(served: Stack) -> Iterator[Client]:
    asked = {"name": "tenant", "scopes": ["models:write:tenant-*", "models:read", "infer:*"]}
    made = served.http.post("/admin/v1/keys", json={**asked, "limits": {"memory_bytes": QUOTA}}).json()
    path = served.home.parent / "heavy.onnx"
    with Client(served.url, key=made["key"], retries=0, timeout=WAIT_S) as client:
        for name in NAMES:
            client.push(name, path)
        yield client


def taken(stack: Stack, prefix: str = "tenant-") -> dict[str, list[int]]:
    """Return the bytes of the loaded instances of models by their names."""
    found: dict[str, list[int]] = {}
    for worker in stack.http.get("/admin/v1/placement").json()["workers"]:
        for one in worker["instances"]:
            if one["state"] == "ready" and one["model"].startswith(prefix):
                found.setdefault(one["model"], []).append(one["size_bytes"] + one["peak_bytes"])
    return found


def total(stack: Stack) -> int:
    return sum(sum(sizes) for sizes in taken(stack).values())


def call(client: Client, name: str) -> None:
    y = client.predict(name, np.ones((1, 1024), np.float32))["y"]
    assert float(y[0, 0]) == pytest.approx(0.5 * 1024 * (MODEL // 4 // 1024), rel=1e-3)


def answers(client: Client, name: str) -> bool:
    with suppress(ServerError):
        call(client, name)
        return True
    return False


def test_models_of_a_key_make_room_for_each_other_and_for_nobody_else(stack: Stack, tenant: Client) -> None:
    neighbour = taken(stack, "neighbour")
    before = stack.metrics().value("millstream_evictions_total", model="neighbour")
    for _ in range(2):
        for name in NAMES:
            call(tenant, name)
            # Two workers that begin loads at the same time learn of each other's with the next heartbeat.
            wait_until(lambda: total(stack) <= QUOTA, what="the quota is kept")
    assert taken(stack, "neighbour").keys() == neighbour.keys()
    assert stack.metrics().value("millstream_evictions_total", model="neighbour") == before


def test_what_a_key_takes_is_shown(stack: Stack, tenant: Client) -> None:
    for name in NAMES[:2]:
        call(tenant, name)
    cli = Millstream(stack.named_home, ADMIN)

    def shown() -> bool:
        [key] = [one for one in cli.json("keys", "list")["keys"] if one["name"] == "tenant"]
        metric = stack.metrics().value("millstream_key_memory_bytes", key="tenant")
        return bool(0 < key["memory_taken_bytes"] == metric <= QUOTA)

    wait_until(shown, what="the list of keys and the metric show what the models take")
    assert "of 230.0 MiB" in cli.ok("keys", "list")
    versions = [tenant.model(name)["versions"][0] for name in NAMES]
    reasons = [one["reason"] or "" for one in versions if one["state"] == "standby"]
    assert reasons
    assert all("the models of key 'tenant'" in reason for reason in reasons), reasons


def configured(stack: Stack, name: str, **settings: Any) -> tuple[int, str]:
    reply = stack.http.patch(f"/admin/v1/models/{name}", json=settings)
    return reply.status_code, str(reply.json().get("error", ""))


def test_no_more_is_always_loaded_than_the_quota(stack: Stack, tenant: Client) -> None:
    for name in NAMES:  # measured from now on
        call(tenant, name)
    with pytest.raises(ServerError, match=r"key 'tenant' that are pinned or always loaded would take \d+ MiB") as error:
        tenant.configure(NAMES[0], instances_min=5)
    assert error.value.status == 403
    for name in NAMES:
        status, message = configured(stack, name, pin=True)
        if status != 200:
            break
    assert (status, "and its limit is 230 MiB" in message) == (403, True)
    assert configured(stack, "neighbour", pin=True, instances_min=2)[0] == 200  # it has no owner
    call(tenant, NAMES[0])
    for name in NAMES:
        assert configured(stack, name, pin=None)[0] == 200


def test_a_model_that_is_larger_than_the_quota_is_refused_with_both_numbers(stack: Stack, tenant: Client) -> None:
    cli = Millstream(stack.named_home, ADMIN)
    call(tenant, NAMES[0])
    try:
        cli.ok("keys", "edit", "tenant", "--memory", "20MiB")
        wait_until(lambda: not taken(stack), what="a quota that was lowered is kept")
        with pytest.raises(ServerError, match="the models of key 'tenant' may take 20 MiB of memory") as error:
            tenant.predict(NAMES[0], np.ones((1, 1024), np.float32))
        assert (error.value.status, error.value.retry_after_s is not None) == (503, True)
    finally:
        cli.ok("keys", "edit", "tenant", "--memory", "230MiB")
    wait_until(lambda: answers(tenant, NAMES[0]), what="it is loaded again")
