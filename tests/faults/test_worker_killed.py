"""Workers are killed under load, and with requests in hand: it costs no request."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np

from tests.kit import models, v2
from tests.kit.load import constant_load
from tests.kit.scale_model import BODIES, check_answers
from tests.kit.stack import running_stack, sigstopped
from tests.kit.wait import wait_until


def test_a_worker_that_is_killed_under_load_costs_no_request(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, gateways=2, pools="cpu=2", models={"steady": path}) as stack:
        before = stack.pids()
        with constant_load(stack.port, "/v2/models/steady/infer", BODIES, callers=16) as load:
            for name in ("cpu-0", "cpu-1"):
                load.more(200)
                os.kill(before[name], signal.SIGKILL)
                stack.wait_for_line(f"{name} was ended by SIGKILL: restarting it")
                wait_until(lambda: stack.pids().get(name, before[name]) != before[name])  # noqa: B023
                stack.settled("steady", 1)
            load.more(200)
        check_answers(load)

        def listed() -> set[int]:
            return {worker["pid"] for worker in stack.http.get("/admin/v1/workers").json()["workers"]}

        wait_until(lambda: listed() == {stack.pids()["cpu-0"], stack.pids()["cpu-1"]}, what="the dead are not listed")


def test_the_only_worker_is_killed_with_requests_in_hand(tmp_path: Path) -> None:
    path = models.slow(tmp_path / "m.onnx", rounds=2000)
    with running_stack(tmp_path, models={"slow": path}) as stack:
        x = np.random.default_rng(1).standard_normal((1, 128), np.float32)
        body, headers = v2.request({"x": x}, parameters=v2.PATIENT)
        first = stack.http.post("/v2/models/slow/infer", content=body, headers=headers)
        expected = v2.outputs(first.content, first.headers)["y"]
        worker = stack.pids()["cpu-0"]
        with sigstopped(worker):
            sent = [stack.send("/v2/models/slow/infer", body, headers) for _ in range(20)]
            wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= 20)
            os.kill(worker, signal.SIGKILL)
        stack.wait_for_line("cpu-0 was ended by SIGKILL: restarting it")
        for connection in sent:
            reply = connection.getresponse()
            got = v2.outputs(reply.read(), dict(reply.getheaders()))
            assert reply.status == 200
            np.testing.assert_allclose(got["y"], expected, rtol=1e-3, atol=1e-4)
            connection.close()
        assert stack.metrics().value("millstream_batches_reclaimed_total") >= 1
