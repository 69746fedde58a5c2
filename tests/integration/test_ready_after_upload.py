"""A model whose upload or load was answered is ready, and answers, in every gateway."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import httpx2

from tests.kit import models
from tests.kit.stack import running_stack

VERSIONS = 6
BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]})


def check(gateways: list[httpx2.Client], factor: float) -> None:
    for gateway in gateways:
        for path in ("/v2/models/m/ready", "/v2/health/ready"):
            reply = gateway.get(path)
            assert reply.status_code == 200, reply.text
        reply = gateway.post("/v2/models/m/infer", content=BODY)
        assert reply.json()["outputs"][0]["data"] == [factor, 2 * factor]


def test_what_was_uploaded_or_loaded_is_ready_in_every_gateway(tmp_path: Path) -> None:
    """The only model of the installation, whose new version replaces the one that answered probes."""
    with running_stack(tmp_path, gateways=3, pools="cpu=2") as stack, ExitStack() as opened:
        gateways = [opened.enter_context(stack.gateway(index)) for index in range(3)]
        for version in range(1, VERSIONS + 1):
            content = models.scale(tmp_path / "m.onnx", factor=float(version)).read_bytes()
            reply = gateways[version % 3].post("/admin/v1/models/m/versions", params={"wait": 240}, content=content)
            assert (reply.status_code, reply.json()["state"]) == (201, "ready"), reply.text
            check(gateways, float(version))
        for index in range(3):
            for what in ("unload", "load"):
                reply = gateways[index].post(f"/v2/repository/models/m/{what}")
                assert reply.status_code == 200, reply.text
            check(gateways, float(VERSIONS))
