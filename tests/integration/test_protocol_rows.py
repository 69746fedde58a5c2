"""The tables of the protocols' references, row by row: what a client gets for each call, in one place."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit import models
from tests.kit.stack import Stack
from tests.kit.wait import wait_until

GOOD: dict[str, Any] = {"inputs": [{"name": "input", "shape": [1, 64], "datatype": "FP32", "data": [0] * 64}]}


@pytest.fixture(scope="module", autouse=True)
def _served(shared_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("models") / "m.onnx"
    shared_stack.push("rows-mlp", models.mlp(path))
    shared_stack.push("loaded", models.mlp(path))


def also(**fields: Any) -> dict[str, Any]:
    """A good request with more in it."""
    return {**GOOD, **fields}


def but(**fields: Any) -> dict[str, Any]:
    """A good request with another input."""
    return {"inputs": [{**GOOD["inputs"][0], **fields}]}


Row = tuple[str, str, Any, int]

#: method, path, body, status; in this order: some change what the next ones see
ROWS: list[Row] = [
    ("GET", "/v2?test_1=1&test_2=2", None, 200),
    ("GET", "/v2/", None, 200),
    ("POST", "/v2", None, 405),
    ("GET", "/v2/nope", None, 404),
    ("GET", "/v2/health/live", None, 200),
    ("GET", "/v2/health/ready", None, 200),
    ("GET", "/v2/models/nope", None, 404),
    ("GET", "/v2/models/rows-mlp/versions/7", None, 404),
    ("GET", "/v2/models/rows-mlp/versions/abc", None, 404),
    ("GET", "/v2/models/nope/ready", None, 404),
    ("GET", "/v2/models/nope/stats", None, 400),
    ("GET", "/v2/models/nope/config", None, 404),
    ("GET", "/v2/models/rows-mlp/stats?x=1", None, 200),
    ("GET", "/v2/models/rows%2Dmlp", None, 200),
    ("POST", "/v2/models/rows-mlp/infer", b"{", 400),
    ("POST", "/v2/models/rows-mlp/infer", {}, 400),
    ("POST", "/v2/models/rows-mlp/infer", but(data=[1]), 400),
    ("POST", "/v2/models/rows-mlp/infer", but(data=["a"] * 64), 400),
    ("POST", "/v2/models/rows-mlp/infer", but(shape=[-1, 64]), 400),
    ("POST", "/v2/models/rows-mlp/infer", also(parameters={"priority": -1}), 400),
    ("POST", "/v2/models/rows-mlp/infer", also(parameters={"timeout": -1}), 400),
    ("POST", "/v2/models/rows-mlp/infer", but(datatype="INT32"), 400),
    ("POST", "/v2/models/rows-mlp/infer", but(datatype="X"), 400),
    ("POST", "/v2/models/rows-mlp/infer", but(name="q"), 400),
    ("POST", "/v2/models/rows-mlp/infer", also(outputs=[{"name": "zz"}]), 400),
    ("POST", "/v2/models/rows-mlp/infer", {"inputs": []}, 400),
    ("POST", "/v2/models/rows-mlp/infer", but(shape=[1, 63], data=[0] * 63), 400),
    ("POST", "/v2/models/loaded/infer", but(shape=[65, 64], data=[0] * 64 * 65), 200),
    ("POST", "/v2/models/rows-mlp/infer", also(outputs=[{"name": "label"}, {"name": "label"}]), 400),
    ("POST", "/v2/models/rows-mlp/infer", also(id=5), 400),
    ("POST", "/v2/models/rows-mlp/infer", also(parameters={"triton_x": 1}), 400),
    ("POST", "/v2/models/rows-mlp/infer", also(parameters={"x": [1]}), 400),
    ("POST", "/v2/models/rows-mlp/infer", also(parameters={"x": 1.5, "y": "s", "z": True}), 200),
    ("POST", "/v2/models/rows-mlp/infer", also(parameters={"sequence_id": 3}), 501),
    ("POST", "/v2/repository/index", b"", 200),
    ("POST", "/v2/repository/index", {"ready": True}, 200),
    ("GET", "/v2/repository/index", None, 405),
    ("POST", "/v2/repository/x/index", b"", 501),
    ("POST", "/v2/repository/models/nope/load", b"", 400),
    ("POST", "/v2/repository/models/nope/unload", b"", 200),
    ("POST", "/v2/repository/models/loaded/load", {"parameters": {"config": '{"max_batch_size":"8"}'}}, 200),
    ("POST", "/v2/repository/models/loaded/load", {"parameters": {"configs": "x"}}, 400),
    ("POST", "/v2/repository/models/loaded/load", {"parameters": {"file:1/model.onnx": "AAAA"}}, 400),
    ("POST", "/v2/repository/models/loaded/unload", {"parameters": {"unload_dependents": True}}, 200),
    ("GET", "/v2/models/loaded/ready", None, 404),
    ("POST", "/v2/models/loaded/infer", GOOD, 404),
    ("POST", "/v2/repository/models/loaded/load", b"", 200),
    ("GET", "/v2/models/loaded/ready", None, 200),
    ("GET", "/v2/trace/setting", None, 200),
    ("POST", "/v2/trace/setting", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}, 200),
    ("POST", "/v2/trace/setting", {"trace_file": "x"}, 501),
    ("POST", "/v2/trace/setting", {"trace_level": ["NOPE"]}, 400),
    ("GET", "/v2/models/nope/trace/setting", None, 400),
    ("POST", "/v2/models/rows-mlp/trace/setting", {"trace_rate": None}, 200),
    ("POST", "/v2/trace/setting", {"trace_level": ["OFF"]}, 200),
    ("GET", "/v2/logging", None, 200),
    ("POST", "/v2/logging", {"log_verbose_level": 1}, 200),
    ("POST", "/v2/logging", {"log_file": "x"}, 501),
    ("POST", "/v2/logging", {"log_format": "X"}, 400),
    ("GET", "/v2/systemsharedmemory/status", None, 200),
    ("GET", "/v2/systemsharedmemory/region/q/status", None, 404),
    ("POST", "/v2/systemsharedmemory/region/q/unregister", b"", 501),
    ("GET", "/v2/cudasharedmemory/status", None, 200),
    ("POST", "/v2/models/rows-mlp/generate", {"input": [0] * 64}, 200),
    ("POST", "/v2/models/rows-mlp/generate_stream", {"input": [0] * 64}, 200),
    ("POST", "/v2/models/rows-mlp/generate", b"x", 400),
    ("POST", "/v1/models/rows-mlp:predict", {"instances": [[0] * 64]}, 200),
    ("POST", "/v1/models/rows-mlp:predict", {"inputs": [[0] * 64]}, 200),
    ("POST", "/v1/models/half:predict", {"instances": []}, 404),
    ("POST", "/v1/models/rows-mlp:predict", {"instances": 3}, 400),
    ("GET", "/v1/models/rows-mlp/metadata", None, 200),
    ("GET", "/", None, 200),
    ("GET", "/ping", None, 200),
    ("GET", "/version", None, 200),
    ("POST", "/endpoints/rows-mlp/invocations", {"instances": [[0] * 64]}, 200),
    ("POST", "/endpoints/nope/invocations", {"instances": [[0] * 64]}, 400),
    ("POST", "/predictions/rows-mlp", [[0] * 64], 200),
    ("POST", "/predictions/nope", [[0] * 64], 404),
    ("GET", "/models", None, 200),
    ("GET", "/models/rows-mlp", None, 200),
    ("OPTIONS", "/", None, 200),
    ("GET", "/api-description", None, 200),
    ("POST", "/v1/embeddings", {"model": "rows-mlp", "input": [1, 2]}, 400),
    ("GET", "/v1/models/nope", None, 404),
]


def test_every_row(stack: Stack) -> None:
    wrong = []
    for method, path, body, status in ROWS:
        how = {} if body is None else {"content": body} if isinstance(body, bytes) else {"json": body}

        def answered() -> Any:
            """503: a worker that a busy machine holds up is away for a moment."""
            reply = stack.http.request(method, path, **how)  # noqa: B023
            return None if reply.status_code == 503 else reply

        reply = wait_until(answered, what=f"{method} {path}")
        if reply.status_code != status:
            wrong.append(f"{method} {path} {str(body)[:80]}: {reply.status_code}, not {status}: {reply.text[:200]}")
        elif status >= 400:
            assert reply.headers["content-type"] == "application/json", path
            assert reply.json(), path
    assert not wrong, "\n".join(wrong)
