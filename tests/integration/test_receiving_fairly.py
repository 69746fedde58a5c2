"""Bodies of one key that stall do not refuse the large requests of another, on the fast path and beside it."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from millstream import Client
from tests.kit import models
from tests.kit.stack import WAIT_S, running_stack
from tests.kit.wait import wait_until

MIB = 1 << 20
ADMIN = "the-admin-key-of-this-test"
SENT = 3 * MIB  # of each body that stalls


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v1/models/m:predict"])
def test_stalled_bodies_of_a_key_leave_room_for_large_requests_of_others(tmp_path: Path, path: str) -> None:
    model = models.scale(tmp_path / "scale.onnx", 2.0, 1024)
    settings = {"admin_key": ADMIN, "inflight_bytes_max": 24 * MIB, "request_bytes_max": 8 * MIB}
    with running_stack(tmp_path, settings=settings, models={"m": model}) as stack, ExitStack() as opened:
        keys = {}
        for name in ("stalls", "works"):
            made = stack.http.post("/admin/v1/keys", json={"name": name, "scopes": ["infer:m"]}).json()
            keys[name] = made["key"]
        for key in keys.values():  # a gateway that has seen a key knows it by its header
            with Client(stack.url, key=key, timeout=WAIT_S) as client:
                client.predict("m", np.ones((1, 1024), np.float32))
        headers = {"Authorization": f"Bearer {keys['stalls']}", "Content-Length": str(2 * SENT)}
        for _ in range(12):
            sent = stack.send(path, b" " * SENT, headers)
            opened.callback(sent.close)
        refused = "millstream_requests_refused_total"
        wait_until(lambda: stack.metrics().value(refused, reason="receiving_full") > 0, what="bodies are refused")
        with Client(stack.url, key=keys["works"], retries=0, timeout=WAIT_S) as client:
            rows = np.ones((1500, 1024), np.float32)  # 6 MB
            assert client.predict("m", rows)["y"].shape == rows.shape
            assert json.loads(stack.http.get("/v2/models/m").text)["name"] == "m"
