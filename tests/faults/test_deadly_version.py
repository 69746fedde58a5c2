"""A storm of requests that crash workers, no two of them alike: the version is refused, and the others go on."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

from millstream.services.repository.folder import FolderRepository
from tests.kit import models, v2
from tests.kit.load import constant_load
from tests.kit.stack import Stack, running_stack
from tests.kit.versions import publish_model
from tests.kit.wait import wait_until

DEADLY = 7
ROW = np.ones((1, 2), np.float32)
PATIENT: dict[str, object] = {"timeout": 110_000_000}  # microseconds: a busy machine takes long to start workers
STORM = 40  # calls
DEATHS_EACH_MAX = 3  # workers that a call ends at most


def call(stack: Stack, *x: int) -> tuple[int, str, dict[str, str]]:
    """Status, error, headers."""
    connection = stack.send(
        "/v2/models/deadly/infer", *v2.request({"x": np.array(x, np.int64).reshape(-1, 1)}, parameters=PATIENT)
    )
    reply = connection.getresponse()
    body, headers = reply.read(), {name.lower(): value for name, value in reply.getheaders()}
    connection.close()
    return reply.status, "" if reply.status == 200 else json.loads(body)["error"], headers


def deaths(stack: Stack) -> int:
    return sum(line.startswith("cpu-") and "was ended by SIGFPE" in line for line in stack.lines)


def test_a_storm_of_crashing_requests_with_changing_bytes(tmp_path: Path) -> None:
    known = FolderRepository(tmp_path / "home" / "repository")
    publish_model(known, "deadly", models.crashing(tmp_path / "deadly.onnx", on=DEADLY))
    steady = {"steady": models.scale(tmp_path / "steady.onnx")}
    with running_stack(tmp_path, pools="cpu=2", gateways=2, models=steady) as stack:
        stack.settled("deadly", 1)
        steady_call = v2.request({"x": ROW}, parameters=PATIENT)
        with constant_load(stack.port, "/v2/models/steady/infer", [steady_call], callers=1) as load:
            load.more(2)
            numbers = iter(range(1000, 100_000))

            def refused() -> dict[str, str] | None:
                status, said, headers = call(stack, DEADLY, next(numbers))
                assert status in {500, 503}, said
                return headers if status == 503 and "version 1 of model 'deadly' ended its worker" in said else None

            headers = wait_until(refused)
            assert 1 <= int(headers["retry-after"]) <= 80  # 10 s at first; longer if it was refused before
            wait_until(lambda: refused() and stack.metrics().value("millstream_version_refused", model="deadly") == 1)
            # The storm goes on, through both gateways, and no worker dies of it until the time of the refusal is over.
            seen, reached, until = deaths(stack), 0, 0.0
            for _ in range(STORM):
                began = time.monotonic()
                headers = refused() or {}
                if "retry-after" in headers:
                    until = began + int(headers["retry-after"]) - 1  # it is rounded up
                else:
                    assert time.monotonic() > until, "it was to be refused"
                    reached += 1
            assert reached < STORM
            assert deaths(stack) <= seen + 2 + DEATHS_EACH_MAX * reached  # 2: what had been sent before
            wait_until(lambda: refused() and stack.http.get("/v2/models/deadly/ready").status_code == 503)
            wait_until(lambda: stack.http.get("/v2/health/ready").status_code == 200)  # workers have just started again
            load.more(10)

            # When its time is over it answers harmless requests again, at once and with no operator's help.
            wait_until(lambda: call(stack, 5)[0] == 200, 300)
            load.more(10)
        assert {reply.status for reply in load.answers} == {200}
        died = [line for line in stack.lines if line.startswith("cpu-") and "was ended by SIGFPE" in line]
        assert all("restarting it at once" in line for line in died)
        stack.settled("steady", 1)  # though workers died while they loaded it
        wait_until(lambda: stack.metrics().value("millstream_worker_deaths_total", model="deadly") >= 5)
        wait_until(lambda: stack.metrics().value("millstream_version_refused", model="deadly") == 0)
