"""Gateways and workers on several machines: their clocks differ, their names and process ids do not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import pytest

from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import RedisAddress
from tests.kit import models, v2
from tests.kit.fleet import fleet
from tests.kit.redis_server import redis_server
from tests.kit.stack import sigstopped

TIMEOUT_S = 240  # less than AHEAD_S: deadlines of a clock that is ahead by that much have passed
AHEAD_S = 301


@pytest.fixture
def address(tmp_path: Path) -> Iterator[RedisAddress]:
    (tmp_path / "redis").mkdir()
    with redis_server(choose_binary(""), tmp_path / "redis") as address:
        yield address


def infer(http: httpx2.Client, value: float, timeout_s: float = TIMEOUT_S) -> httpx2.Response:
    body, headers = v2.request(
        {"x": np.full((1, 2), value, np.float32)}, parameters={"timeout": round(timeout_s * 1e6)}
    )
    return http.post("/v2/models/scale/infer", content=body, headers=headers)


def check(reply: httpx2.Response, value: float) -> None:
    assert reply.status_code == 200, reply.text
    [answer] = v2.outputs(reply.content, dict(reply.headers)).values()
    assert answer.tolist() == [[2 * value] * 2]


@pytest.mark.parametrize(
    ("gateway_s", "worker_s"),
    [(0, AHEAD_S), (0, -86400), (3600, 0), (-3600, 3600)],
    ids=lambda seconds: f"{seconds:+} s",
)
def test_machines_whose_clocks_differ_serve_as_others(tmp_path, address, gateway_s, worker_s):
    """A worker that was ahead took all deadlines below that for passed; one behind ran what no caller waited for
    any more.
    """
    with fleet(tmp_path / "fleet", address) as machines:
        http = machines.gateway(gateway_s)
        worker = machines.worker(worker_s)
        machines.push(http, "scale", models.scale(tmp_path / "scale.onnx"))
        for value in range(5):
            check(infer(http, value), value)
        [statistics] = http.get("/v2/models/scale/stats").json()["model_stats"]
        queue = statistics["inference_stats"]["queue"]
        assert queue["count"] >= 5
        assert queue["ns"] / queue["count"] < TIMEOUT_S * 1e9
        [known] = machines.workers(http)
        assert known["heartbeat_age_s"] < TIMEOUT_S
        with ThreadPoolExecutor(1) as threads:
            with sigstopped(worker.pid):
                late = threads.submit(infer, http, 7, 1.0)
                assert late.result().status_code == 504
            check(infer(http, 8), 8)
        [after] = http.get("/v2/models/scale/stats").json()["model_stats"]
        assert after["inference_count"] == statistics["inference_count"] + 1, "what was too late did not run"


def test_machines_with_other_clocks_share_the_work(tmp_path, address):
    """Two gateways and three workers, each of which believes that it is another hour."""
    with fleet(tmp_path / "fleet", address) as machines:
        ahead, behind = machines.gateway(3600), machines.gateway(-3600)
        for number, seconds in enumerate((0, AHEAD_S, -AHEAD_S)):
            machines.worker(seconds, index=str(number))
        machines.push(ahead, "scale", models.scale(tmp_path / "scale.onnx"))
        for http in (ahead, behind):
            machines.until_workers(http, 3)
        with ThreadPoolExecutor(8) as threads:
            asked = [(http, value) for value in range(40) for http in (ahead, behind)]
            for (_, value), reply in zip(asked, threads.map(lambda one: infer(*one), asked), strict=True):
                check(reply, value)


def test_containers_with_one_name_are_as_many_workers(tmp_path, address):
    """The same image, host name and index; in a container also the process id would be the same."""
    with fleet(tmp_path / "fleet", address) as machines:
        http = machines.gateway()
        processes = [machines.worker(index="worker") for _ in range(3)]
        machines.push(http, "scale", models.scale(tmp_path / "scale.onnx"))
        known = machines.until_workers(http, 3)
        assert len({worker["id"] for worker in known}) == 3
        assert all(worker["id"].startswith("cpu-0@worker-") for worker in known)
        machines.stop(processes[0])
        machines.until_workers(http, 2)
        check(infer(http, 1), 1)


def test_two_installations_on_one_redis_do_not_meet(tmp_path, address):
    """The second has no workers: it is not ready and runs nothing on those of the first, whose models are others."""
    with fleet(tmp_path / "one", address) as one, fleet(tmp_path / "two", address) as two:
        first, second = one.gateway(), two.gateway()
        one.worker()
        one.push(first, "scale", models.scale(tmp_path / "scale.onnx"))
        assert one.until_workers(first, 1)
        assert two.workers(second) == []
        assert second.get("/v2/health/ready").status_code == 503
        two.worker()
        two.push(second, "scale", models.scale(tmp_path / "scale10.onnx", 10.0))
        (own,) = two.until_workers(second, 1)
        assert own["id"] not in {worker["id"] for worker in one.workers(first)}
        for value in range(5):
            check(infer(first, value), value)
            [answer] = v2.outputs((reply := infer(second, value)).content, dict(reply.headers)).values()
            assert answer.tolist() == [[10 * value] * 2]
