"""TorchServe's clients: requests and aiohttp as its examples use them; and /models as SageMaker's containers
have it.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import numpy as np
import onnxruntime
import pytest

from tests.kit import models
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.wait import wait_until

ROWS = np.random.default_rng(13).standard_normal((2, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchserve")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Stack]:
    imports = folder / "imports"
    imports.mkdir()
    with running_stack(folder, settings={"import_dir": imports}) as stack:
        stack.push("ts-mlp", models.mlp(folder / "mlp.onnx"))
        stack.push("ts-scale", models.scale(folder / "two.onnx", 2.0), version=1)
        stack.push("ts-scale", models.scale(folder / "three.onnx", 3.0), version=2)
        stack.push("ts-add", models.add_sub(folder / "add.onnx"))
        stack.push("ts-text", models.identity(folder / "text.onnx", datatype="BYTES", shape=("N", 1)))
        stack.push("ts-lookup", models.failing(folder / "lookup.onnx"))
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    yield served
    assert_quiet(served)


def ok(reply: httpx2.Response) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(reply: httpx2.Response, status: int, kind: str) -> str:
    assert reply.headers["x-request-id"]
    document = reply.json()
    assert (reply.status_code, document["code"], document["type"]) == (status, status, kind), document
    message: str = document["message"]
    return message


def test_predictions_are_those_of_onnx_runtime(stack: Stack, folder: Path) -> None:
    session = onnxruntime.InferenceSession(folder / "mlp.onnx", providers=["CPUExecutionProvider"])
    expected = session.run(None, {"input": ROWS})[0]
    file = io.BytesIO()
    np.save(file, ROWS)
    one = json.dumps(ROWS[0].tolist()).encode()
    for options in (
        {"json": ROWS[0].tolist()},
        {"json": {"data": ROWS[0].tolist()}},
        {"content": one},
        {"files": {"data": one}},
        {"files": {"data": ROWS[0].tobytes()}},
        {"content": ROWS[0].tobytes(), "headers": {"Content-Type": "application/octet-stream"}},
    ):
        reply = stack.http.post("/predictions/ts-mlp", **options)
        np.testing.assert_allclose(ok(reply), expected[0], rtol=1e-5)
        assert reply.headers["x-request-id"]
    for options in ({"json": ROWS.tolist()}, {"content": file.getvalue()}, {"files": {"input": file.getvalue()}}):
        np.testing.assert_allclose(ok(stack.http.post("/predictions/ts-mlp", **options)), expected, rtol=1e-5)


def test_with_aiohttp(stack: Stack) -> None:
    async def ask() -> list[Any]:
        async with aiohttp.ClientSession(stack.url) as session:

            async def one(number: int) -> Any:
                form = aiohttp.FormData()
                form.add_field("data", json.dumps([number, 1]), filename="row.json")
                async with session.post("/predictions/ts-scale", data=form) as reply:
                    return await reply.json()

            return await asyncio.gather(*(one(number) for number in range(8)))

    assert asyncio.run(ask()) == [[3.0 * number, 3.0] for number in range(8)]


def test_versions_several_inputs_and_text(stack: Stack) -> None:
    for version, expected in (("", [3.0, 6.0]), ("/1", [2.0, 4.0]), ("/2.0", [3.0, 6.0])):
        assert ok(stack.http.post(f"/predictions/ts-scale{version}", json=[1, 2])) == expected
    both = {"a": [1, 2, 3, 4], "b": [1, 1, 1, 1]}
    assert ok(stack.http.post("/predictions/ts-add", json=both)) == {"sum": [2, 3, 4, 5], "difference": [0, 1, 2, 3]}
    parts = {name: json.dumps(value).encode() for name, value in both.items()}
    assert ok(stack.http.post("/predictions/ts-add", files=parts))["sum"] == [2, 3, 4, 5]
    assert ok(stack.http.post("/predictions/ts-text", content=b"hello")) == ["hello"]
    assert ok(stack.http.post("/predictions/ts-text", json=[["a"], ["b"]])) == [["a"], ["b"]]


def test_errors(stack: Stack) -> None:
    post = stack.http.post
    assert refused(post("/predictions/nope"), 404, "ModelNotFoundException") == "Model not found: nope"
    message = refused(post("/predictions/ts-scale/9.0"), 404, "ModelVersionNotFoundException")
    assert message == "Model version: 9.0 does not exist for model: ts-scale; it has versions 2 and 1"
    assert "unexpected shape" in refused(post("/predictions/ts-scale", json=[1]), 400, "BadRequestException")
    assert "Integer division by zero" in refused(post("/predictions/ts-lookup", json=[99]), 500, "PredictionException")
    refused(stack.http.get("/predictions/ts-scale"), 405, "MethodNotAllowedException")
    refused(stack.http.get("/predictions/a/b/c"), 404, "ResourceNotFoundException")
    refused(post("/explanations/ts-scale"), 501, "BadRequestException")


def test_ping_and_the_description_of_the_api(stack: Stack) -> None:
    wait_until(lambda: stack.http.get("/ping").json() == {"status": "Healthy"}, what="probes are answered")
    described = ok(stack.http.get("/api-description"))
    assert described == ok(stack.http.options("/"))
    assert "/predictions/{model}" in described["paths"]


def test_models_are_described(stack: Stack) -> None:
    listed = ok(stack.http.get("/models", params={"limit": 2}))
    assert [one["modelName"] for one in listed["models"]] == ["ts-add", "ts-lookup"]
    rest = ok(stack.http.get("/models", params={"limit": 100, "next_page_token": listed["nextPageToken"]}))
    assert "ts-scale" in [one["modelName"] for one in rest["models"]]
    refused(stack.http.get("/models", params={"limit": 0}), 400, "BadRequestException")
    (one,) = ok(stack.http.get("/models/ts-scale"))
    assert (one["modelName"], one["modelVersion"], one["minWorkers"]) == ("ts-scale", "2", 1)
    assert one["workers"][0]["status"] == "READY"
    assert one["jobQueueStatus"] == {"remainingCapacity": 8192, "pendingRequests": 0}
    assert [one["modelVersion"] for one in ok(stack.http.get("/models/ts-scale/all"))] == ["1", "2"]
    assert ok(stack.http.get("/models/ts-scale/1.0"))[0]["modelVersion"] == "1"
    refused(stack.http.get("/models/nope"), 404, "ModelNotFoundException")
    refused(stack.http.get("/models/ts-scale/7"), 404, "ModelVersionNotFoundException")
    status = ok(stack.http.put("/models/ts-scale", params={"min_worker": 3}))["status"]
    assert status.startswith("1 workers of pool cpu hold version 2")


def test_a_model_from_its_registration_to_its_end(stack: Stack, folder: Path) -> None:
    models.scale(folder / "imports" / "four.onnx", 4.0)
    nested = folder / "imports" / "five" / "1"
    nested.mkdir(parents=True)
    models.scale(nested / "model.onnx", 5.0)
    post = stack.http.post
    first = ok(post("/models", params={"url": "four.onnx", "model_name": "ts-new", "synchronous": "true"}))
    assert first["status"] == 'Model "ts-new" Version: 1 registered with 1 initial workers'
    assert ok(post("/predictions/ts-new", json=[1, 1])) == [4.0, 4.0]
    ok(post("/models", params={"url": "five", "model_name": "ts-new", "synchronous": "true"}))
    assert ok(post("/predictions/ts-new", json=[1, 1])) == [5.0, 5.0]

    ok(stack.http.put("/models/ts-new/1/set-default"))
    assert ok(post("/predictions/ts-new", json=[1, 1])) == [4.0, 4.0]
    refused(stack.http.put("/models/ts-new/9/set-default"), 404, "ModelVersionNotFoundException")
    kept = stack.http.delete("/models/ts-new")
    assert (kept.status_code, kept.json()["message"]) == (403, "Cannot remove default version 1 for model ts-new")
    assert ok(stack.http.delete("/models/ts-new/2")) == {"status": 'Model "ts-new" unregistered'}
    assert ok(stack.http.delete("/models/ts-new")) == {"status": 'Model "ts-new" unregistered'}
    refused(stack.http.delete("/models/ts-new"), 404, "ModelNotFoundException")

    (folder / "imports" / "junk.onnx").write_bytes(b"junk")
    refused(post("/models", params={"url": "junk.onnx"}), 400, "BadRequestException")
    refused(post("/models", params={"url": "nope.onnx"}), 404, "ResourceNotFoundException")
    refused(post("/models", params={"url": "../mlp.onnx"}), 400, "BadRequestException")
    refused(post("/models", params={"url": "https://example.com/m.mar"}), 501, "BadRequestException")
    refused(post("/models"), 400, "BadRequestException")
    refused(post("/models", content=b"{}"), 400, "BadRequestException")


def test_a_container_of_several_models(tmp_path: Path) -> None:
    imports = tmp_path / "models"
    model = imports / "a1b2" / "model"
    model.mkdir(parents=True)
    models.scale(model / "model.onnx", 2.0)
    with running_stack(tmp_path, settings={"sagemaker_multi_model": True, "import_dir": imports}) as stack:
        load = {"model_name": "a1b2", "url": str(model)}
        assert stack.http.post("/models", json=load).status_code == 200
        assert stack.http.post("/models", json=load).status_code == 409
        assert stack.http.get("/models/a1b2").json()["modelName"] == "a1b2"
        assert [one["modelName"] for one in stack.http.get("/models").json()["models"]] == ["a1b2"]
        asked = stack.http.post("/models/a1b2/invoke", json=[[1, 2]], headers={"Accept": "text/csv"})
        assert asked.text == "2.0,4.0\n"
        assert stack.http.post("/models/nope/invoke", json=[[1, 2]]).status_code == 404
        assert stack.http.delete("/models/a1b2").status_code == 200
        assert stack.http.delete("/models/a1b2").status_code == 404
        assert stack.http.get("/models/a1b2").status_code == 404


def test_management_needs_the_key_and_predictions_do_not(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, settings={"admin_key": "k"}, models={"m": path}) as stack:
        with httpx2.Client(base_url=stack.url, timeout=300, trust_env=False) as stranger:
            for method, where in (
                ("PUT", "/models/m"),
                ("DELETE", "/models/m"),
                ("POST", "/models"),
                ("PUT", "/models/m/1/set-default"),
            ):
                refused(stranger.request(method, where), 401, "InvalidKeyException")
            assert stranger.post("/predictions/m", json=[1, 2]).json() == [2.0, 4.0]
        assert stack.http.get("/models").status_code == 200
        refused(stack.http.post("/models", params={"url": "m.onnx"}), 501, "BadRequestException")
