"""A client goes on while gateways are replaced or killed, and says what happened when the product is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from millstream import Client, Code, ConnectionFailed, ServerError
from millstream.gateway.scheduling.readiness import PROBE_BYTES_MAX
from tests.kit import models
from tests.kit.stack import running_stack, sigstopped
from tests.kit.wait import wait_until

X = np.array([[1, 2]], np.float32)
TIMEOUT_S = 300.0  # a busy machine takes a minute to start a gateway
RETRIES = 1000  # as many as there is time for
#: Inputs so large that no readiness probe is sent, which would be in flight, too.
UNPROBED_COLUMNS = PROBE_BYTES_MAX // 4 + 1


def test_no_prediction_fails_while_gateways_are_replaced(tmp_path: Path) -> None:
    with (
        running_stack(tmp_path, models={"m": models.scale(tmp_path / "m.onnx")}) as stack,
        Client(stack.url, key=stack.key, timeout=TIMEOUT_S) as client,
    ):
        done, count = threading.Event(), 0
        restart = [sys.executable, "-P", "-m", "millstream.services.cli", "restart", "gateways", "--home"]
        with subprocess.Popen([*restart, str(stack.home)], stdout=subprocess.PIPE) as process:

            def watch_process() -> None:
                process.wait()
                done.set()

            watch = threading.Thread(target=watch_process)
            watch.start()
            while not done.is_set():
                assert client.predict("m", X)["y"].tolist() == [[2, 4]]
                count += 1
            watch.join()
            assert process.returncode == 0
        assert client.predict("m", X)["y"].tolist() == [[2, 4]]
        print(f"{count} predictions, all answered")


def test_a_killed_gateway_is_waited_for(tmp_path: Path) -> None:
    """The only gateway is killed: its port refuses or resets until the next one listens."""
    with running_stack(tmp_path, models={"m": models.scale(tmp_path / "m.onnx")}) as stack:
        with Client(stack.url, key=stack.key, retries=RETRIES, timeout=TIMEOUT_S) as client:
            assert client.predict("m", X)["y"].tolist() == [[2, 4]]
            os.kill(stack.pids()["gateway-0"], signal.SIGKILL)
            assert client.predict("m", X)["y"].tolist() == [[2, 4]]
        stack.reconnect()


def test_a_full_gateway_is_asked_again_as_it_says(tmp_path: Path) -> None:
    """The worker sleeps, so the first request stays in flight; the gateway admits no other meanwhile."""
    settings = {"inflight_requests_max": 1, "queue_lease_s": 120}
    wide = models.identity(tmp_path / "m.onnx", shape=(1, UNPROBED_COLUMNS))
    one = np.ones((1, UNPROBED_COLUMNS), np.float32)
    with (
        running_stack(tmp_path, settings=settings, models={"m": wide}) as stack,
        Client(stack.url, key=stack.key, retries=RETRIES, timeout=TIMEOUT_S) as client,
        Client(stack.url, key=stack.key, retries=0, timeout=TIMEOUT_S) as impatient,
        ThreadPoolExecutor(2) as pool,
    ):
        np.testing.assert_array_equal(client.predict("m", one)["y"], one)
        with sigstopped(stack.pids()["cpu-0"]):
            first = pool.submit(client.predict, "m", one)
            wait_until(lambda: client.metrics().value("millstream_requests_in_flight") == 1, what="one in flight")
            with pytest.raises(ServerError) as refused:
                impatient.predict("m", one)
            assert refused.value.code in {Code.OVERLOADED, Code.UNAVAILABLE}
            assert (refused.value.retry_after_s or 0) >= 1
            before = refusals(client)
            second = pool.submit(client.predict, "m", 2 * one)
            wait_until(lambda: refusals(client) > before, what="the second is refused")
        np.testing.assert_array_equal(first.result()["y"], one)
        np.testing.assert_array_equal(second.result()["y"], 2 * one)


def refusals(client: Client) -> float:
    return sum(one.value for one in client.metrics().samples if "refused" in one.name and one.name.endswith("_total"))


def test_a_stopped_product_is_a_refused_connection(tmp_path: Path) -> None:
    with running_stack(tmp_path) as stack, Client(stack.url, key=stack.key, retries=1) as client:
        assert client.models() == []
        assert stack.stop() == 0
        with pytest.raises(ConnectionFailed, match="is `millstream up` running"):
            client.models()
