"""The size of pools as people and scalers see it: admin API, metrics, `millstream autoscale`, and compose."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream import Client
from millstream.plugins.fleet.cli import wanted_of
from millstream.plugins.fleet.controller.autoscale.decision import Reason
from millstream.services.environment import child_environment
from millstream.services.queue.keys import InstallationKeys
from tests.kit.command_line import Millstream
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

KEYS = {
    *("pool", "wanted", "ready", "workers_min", "workers_max", "queue_rows", "oldest_wait_s", "arrival_rows_per_s"),
    *("capacity_rows_per_s", "utilisation", "reason", "decided_at", "start_s", "explanation"),
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("scale"), pools="cpu=1:3", controller=True) as started:
        wait_until(lambda: scale(started)["pools"], what="a decision")
        wait_until(lambda: pool(started)["ready"] == 1, what="a worker serves")
        yield started


def scale(stack: Stack) -> dict[str, Any]:
    reply = stack.http.get("/admin/v1/scale")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def pool(stack: Stack, name: str = "cpu") -> dict[str, Any]:
    found: dict[str, Any] = stack.http.get(f"/admin/v1/scale/{name}").json()
    return found


def test_the_admin_api_says_how_many_are_wanted(stack):
    found = pool(stack)
    assert found.keys() == KEYS
    assert (found["pool"], found["wanted"], found["workers_min"], found["workers_max"]) == ("cpu", 1, 1, 3)
    assert found["explanation"][-1].startswith("wanted: 1")
    assert [one["pool"] for one in scale(stack)["pools"]] == ["cpu"]


def test_the_admin_api_says_what_was_decided_before(stack):
    [first, *_] = stack.http.get("/admin/v1/scale/cpu/changes").json()["changes"]
    assert first.keys() == KEYS
    assert (first["pool"], first["wanted"]) == ("cpu", 1)
    assert stack.http.get("/admin/v1/scale/tpu/changes").json() == {"changes": []}


def test_a_pool_that_there_is_not(stack):
    reply = stack.http.get("/admin/v1/scale/tpu")
    assert reply.status_code == 404
    assert "the pools are cpu" in reply.json()["error"]


def test_the_metrics_are_on_the_gateways_page(stack):
    for shown in ("wanted", "ready"):
        wait_until(lambda: stack.metrics().value(f"millstream_workers_{shown}", pool="cpu") == 1)  # noqa: B023
    page = stack.metrics()
    for name in ("queue_rows", "oldest_wait_seconds", "arrival_rows_per_second", "utilisation_ratio"):
        assert page.value(f"millstream_pool_{name}", pool="cpu") == 0


def test_the_client_reads_it(stack):
    with Client(stack.url, key=stack.key) as client:
        assert [one["pool"] for one in client.scale()] == ["cpu"]
        assert client.pool_scale("cpu")["workers_max"] == 3


def test_the_table_and_the_arithmetic(stack):
    line = Millstream(stack.home)
    table = line.ok("autoscale", "--endpoint", stack.url)
    assert table.split()[:3] == ["POOL", "WANTED", "READY"]
    assert "1 to 3" in table
    explained = line.ok("autoscale", "explain", "cpu", "--endpoint", stack.url)
    assert "arrivals:" in explained
    assert "wanted: 1" in explained
    assert json.loads(line.ok("autoscale", "show", "cpu", "--json", "--endpoint", stack.url)).keys() == KEYS


def test_compose_is_printed_or_run(stack, tmp_path, monkeypatch):
    line = Millstream(stack.home)
    command = "docker compose --file x.yml up --detach --no-recreate --no-deps --scale worker-cpu=1 worker-cpu"
    assert line.ok("autoscale", "compose", "--file", "x.yml", "--endpoint", stack.url).strip() == command
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\necho "docker $@" > {tmp_path}/ran\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    line.ok("autoscale", "compose", "--run", "--file", "x.yml", "--endpoint", stack.url)
    assert Path(tmp_path / "ran").read_text().strip() == command


def test_compose_is_not_told_the_size_of_pools_without_limits(stack):
    with Client(stack.url, key=stack.key) as client:
        (one,) = client.scale()
    assert wanted_of([one, {**one, "pool": "gpu", "reason": Reason.UNBOUNDED.value}]) == {"cpu": 1}


def test_compose_that_watches_outlives_a_gateway_that_is_away(stack):
    """It is what starts and stops the workers: a gateway that is replaced must not end it."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        away = f"http://127.0.0.1:{closed.getsockname()[1]}"
    command = [sys.executable, "-P", "-m", "millstream.services.cli", "autoscale", "compose", "--watch"]
    with subprocess.Popen(
        [*command, "--endpoint", away], env=child_environment({}), stderr=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stderr is not None
        assert watching.stderr.readline().strip().endswith("trying again")
        assert watching.poll() is None
        watching.terminate()


def test_old_decisions_are_not_given_to_scalers(stack):
    """Without a leading controller a scaler learns that nothing is known, and does not act on what was."""
    key = InstallationKeys(stack.installation).scale.decode()
    old = {**pool(stack), "pool": "gone", "decided_at": 1.0}
    stack.redis.hset(key, "gone", json.dumps(old))
    # The controller removes it with its next round: until then it is refused, never answered.
    answers = {stack.http.get("/admin/v1/scale/gone").status_code for _ in range(3)}
    assert answers <= {404, 503}
    wait_until(lambda: stack.http.get("/admin/v1/scale/gone").status_code == 404, what="it is forgotten")
