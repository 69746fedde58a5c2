"""A client goes on while gateways are replaced or killed, and says what happened when the product is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from millstream import Client, ConnectionFailed
from tests.kit import models
from tests.kit.stack import running_stack

X = np.array([[1, 2]], np.float32)


def test_no_prediction_fails_while_gateways_are_replaced(tmp_path: Path) -> None:
    with running_stack(tmp_path, models={"m": models.scale(tmp_path / "m.onnx")}) as stack, Client(stack.url) as client:
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
        with Client(stack.url, retries=12) as client:
            assert client.predict("m", X)["y"].tolist() == [[2, 4]]
            os.kill(stack.pids()["gateway-0"], signal.SIGKILL)
            assert client.predict("m", X)["y"].tolist() == [[2, 4]]
        stack.reconnect()


def test_a_stopped_product_is_a_refused_connection(tmp_path: Path) -> None:
    with running_stack(tmp_path) as stack, Client(stack.url, retries=1) as client:
        assert client.models() == []
        assert stack.stop() == 0
        with pytest.raises(ConnectionFailed, match="is `millstream up` running"):
            client.models()
