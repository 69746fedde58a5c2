"""The console of a server without API keys and with two gateways: calls of both, what is open, and the command."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.kit import models
from tests.kit.command_line import Millstream
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

DATA = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
INFER = "/v2/models/m/infer"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("console")
    with running_stack(folder, gateways=2) as started:
        started.push("m", models.scale(folder / "m.onnx", 2.0, 4))
        yield started


def fresh(stack: Stack) -> httpx2.Client:
    """A caller without a key on a connection of its own, which any gateway takes."""
    return httpx2.Client(base_url=stack.url, trust_env=False, timeout=60)


def test_calls_of_all_gateways_are_told_with_their_stages_once_somebody_looks(stack: Stack) -> None:
    def told() -> dict[str, Any]:
        with fresh(stack) as client:
            for body, status in ((DATA, 200), (DATA | {"inputs": []}, 400)):
                assert client.post(INFER, json=body).status_code == status
            found: dict[str, Any] = client.get(
                "/console/api/requests", headers={"Authorization": f"Bearer {stack.key}"}
            ).json()
        return found

    began = told()["since"]
    names = {"gateway-0", "gateway-1"}
    for kind in ("slowest", "failed"):
        wait_until(lambda: {one["gateway"] for one in told()[kind]} == names, what=f"{kind} of both")  # noqa: B023
    found = told()
    assert abs(found["since"] - began) < 60, "the first look counts"
    assert {(one["model"], one["status"], one["route"]) for one in found["slowest"]} == {
        ("m", 200, "/v2/models/{model}/infer")
    }
    assert {(one["model"], one["status"]) for one in found["failed"]} == {("m", 400)}
    runs = [run for call in found["slowest"] for run in call["runs"]]
    assert len(runs) == len(found["slowest"])
    assert any(run["lane_s"] is not None and run["queue_s"] >= 0 < run["run_s"] for run in runs)


def test_without_keys_anybody_watches_and_calls_what_the_api_leaves_open(stack: Stack) -> None:
    with fresh(stack) as client:
        session = client.get("/console/api/session").json()
        assert (session["signed_in"], session["keys_required"]) == (False, False)
        offered = {name for name, allowed in session["can"].items() if allowed}
        assert offered == {"watch", "infer", "metrics"}
        with client.stream("GET", "/console/api/events") as reply:
            assert reply.status_code == 200
            sample = _sample(reply)
            assert [one["model"] for one in sample["endpoints"]] == ["m"]
            assert sample["totals"]["gateways"] == 2
        assert client.get("/console/api/history").status_code == 200
        assert client.get("/console/api/call/metrics").status_code == 200
        for closed in ("events?logs=1", "logs", "requests", "call/admin/v1/models"):
            assert client.get(f"/console/api/{closed}").status_code == 401, closed
    with fresh(stack) as operator:
        assert operator.post("/console/api/session", json={"key": stack.key}).status_code == 204
        with operator.stream("GET", "/console/api/events", params={"logs": "1"}) as reply:
            assert reply.status_code == 200


def _sample(reply: httpx2.Response) -> Any:
    return next(json.loads(line.removeprefix("data: ")) for line in reply.iter_lines() if line.startswith("data: "))


def test_the_command_prints_a_link_that_signs_in(stack: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    millstream = Millstream(stack.home)
    link = millstream.ok("console").strip()
    url, _, key = link.partition("#login=")
    assert url == f"{stack.url}/console/"
    assert millstream.json("console") == {"url": url, "link": link}
    with fresh(stack) as client:
        assert client.post("/console/api/session", json={"key": key}).status_code == 204

    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    assert millstream.ok("console", "--open").strip() == link
    assert opened.read_text().strip() == link


def test_the_command_says_where_no_browser_is_and_where_no_key_is_known(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = Millstream(stack.home).run("console", "--open")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no browser" in done.stderr
    assert done.stdout.startswith(stack.url), "the link is printed all the same"
    elsewhere = Millstream(tmp_path / "home")
    assert "--key" in elsewhere.fails("console", "--endpoint", stack.url)


def test_calls_of_a_gateway_that_died_and_what_the_next_one_records_are_told(stack: Stack) -> None:
    def told() -> set[str]:
        with fresh(stack) as client:
            assert client.post(INFER, json=DATA).status_code == 200
            reply = client.get("/console/api/requests", headers={"Authorization": f"Bearer {stack.key}"})
            return {one["gateway"] for one in reply.json()["slowest"]}

    wait_until(lambda: told() == {"gateway-0", "gateway-1"}, what="both record")
    died = stack.pids()["gateway-1"]
    os.kill(died, signal.SIGKILL)
    wait_until(lambda: stack.pids().get("gateway-1", died) != died, what="it is started again")
    assert wait_until(told) == {"gateway-0", "gateway-1"}
