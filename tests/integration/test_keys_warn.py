"""A server that warns serves what was open before its first key, over every path, and tells what it will refuse."""

from __future__ import annotations

from pathlib import Path

import httpx2
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.kit import models
from tests.kit.stack import CALL_S_MAX, running_stack
from tests.kit.wait import wait_until

BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
INFER = "/v2/models/one/infer"


def test_calls_that_will_be_refused_are_served_and_counted_by_reason(tmp_path: Path) -> None:
    with (
        running_stack(tmp_path, settings={"keys": "warn"}) as stack,
        httpx2.Client(base_url=stack.url, timeout=CALL_S_MAX, trust_env=False) as bare,
        triton.InferenceServerClient(stack.grpc) as over_grpc,
    ):
        stack.push("one", models.scale(tmp_path / "m.onnx"))
        tensor = triton.InferInput("x", [1, 2], "FP32").set_data_from_numpy(np.ones((1, 2), np.float32))
        made = stack.http.post("/admin/v1/keys", json={"name": "other", "scopes": ["infer:two"]}).json()
        lacking, wrong = f"Bearer {made['key']}", f"Bearer {made['key'][:-1]}_"
        for headers in ({}, {"Authorization": lacking}, {"Authorization": wrong}, {"X-API-Key": "text"}):
            for _ in range(2):
                reply = bare.post(INFER, json=BODY, headers=headers)
                assert (reply.status_code, reply.json()["outputs"][0]["data"]) == (200, [2, 4]), reply.text
            assert "one" in bare.get("/v2/models", headers=headers).text
            assert bare.get("/metrics", headers=headers).status_code == 200
            grpc_headers = {name.lower(): value for name, value in headers.items()}
            assert over_grpc.infer("one", [tensor], headers=grpc_headers).as_numpy("y").tolist() == [[2, 2]]
            assert over_grpc.is_model_ready("one", headers=grpc_headers)
            assert bare.get("/admin/v1/models", headers=headers).status_code in {401, 403}
            assert bare.delete("/admin/v1/models/one", headers=headers).status_code in {401, 403}
            with pytest.raises(InferenceServerException):
                over_grpc.unload_model("one", headers=grpc_headers)
        page = stack.metrics()
        for key, outcome in (("none", "missing"), ("none", "malformed"), ("none", "unknown"), ("other", "forbidden")):
            assert page.value("millstream_key_requests_total", key=key, outcome=outcome) >= 6, (key, outcome)


def test_a_server_that_enforces_tells_why_it_refuses(tmp_path: Path) -> None:
    with running_stack(tmp_path) as stack, httpx2.Client(base_url=stack.url, trust_env=False) as bare:
        stack.push("one", models.scale(tmp_path / "m.onnx"))
        made = stack.http.post("/admin/v1/keys", json={"name": "team", "scopes": ["infer:one"]}).json()
        theirs = {"Authorization": f"Bearer {made['key']}"}
        assert bare.post(INFER, json=BODY, headers=theirs).status_code == 200
        assert bare.post(INFER, json=BODY).status_code == 401
        stack.http.delete("/admin/v1/keys/team").raise_for_status()
        assert bare.post(INFER, json=BODY, headers=theirs).status_code == 401
        page = stack.metrics()
        assert page.value("millstream_key_requests_total", key="none", outcome="missing") == 1
        assert page.value("millstream_key_requests_total", key="team", outcome="revoked") == 1


def test_use_is_exported_by_key_and_the_access_log_names_it(tmp_path: Path) -> None:
    with (
        running_stack(tmp_path, settings={"access_log": "file"}) as stack,
        httpx2.Client(base_url=stack.url, timeout=CALL_S_MAX, trust_env=False) as bare,
        triton.InferenceServerClient(stack.grpc) as over_grpc,
    ):
        stack.push("one", models.scale(tmp_path / "m.onnx"))
        made = stack.http.post("/admin/v1/keys", json={"name": "team", "scopes": ["infer:one"]}).json()
        theirs = {"authorization": f"Bearer {made['key']}"}
        rows = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 2], "data": [1] * 6}]}
        tensor = triton.InferInput("x", [3, 2], "FP32").set_data_from_numpy(np.ones((3, 2), np.float32))
        for _ in range(2):
            assert bare.post(INFER, json=rows, headers=theirs).status_code == 200
            over_grpc.infer("one", [tensor], headers=theirs)
        assert bare.get("/v2/models/one", headers=theirs).status_code == 200
        page = stack.metrics()
        assert page.value("millstream_key_rows_total", key="team") == 12
        assert 0 < page.value("millstream_key_run_seconds_total", key="team") < 60

        def named() -> bool:
            logged = "".join(path.read_text() for path in (stack.home / "logs").glob("*access*"))
            theirs = [line for line in logged.splitlines() if line.endswith(", key team)")]
            return len(theirs) == 5 and sum("ModelInfer" in line for line in theirs) == 2

        wait_until(named, what="the access log names the key of each call")
