"""What a version may say about how it is served, in a running product: optional inputs, other shapes, warm-up, few
workers.
"""

from __future__ import annotations

import hashlib
import io
import json
import select
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from millstream.client.inference import random_request
from millstream.services.model.manifest import Manifest, ModelConfig, SourceFile
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.repository.folder import FolderRepository
from tests.kit import models, v2
from tests.kit.stack import Stack, assert_quiet, running_stack, sigstopped
from tests.kit.wait import wait_until

WORKERS = 2


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    # The lease outlasts every stop: a worker that is only stopped stays a worker.
    folder, settings = tmp_path_factory.mktemp("terms"), {"queue_lease_s": 120}
    with running_stack(folder, pools=f"cpu={WORKERS}", settings=settings) as stack:
        yield stack


@pytest.fixture
def stack(serving: Stack) -> Iterator[Stack]:
    yield serving
    assert_quiet(serving)


def infer(stack: Stack, model: str, inputs: dict[str, np.ndarray], **parameters: object) -> httpx2.Response:
    body, headers = v2.request(inputs, parameters=parameters)
    return stack.http.post(f"/v2/models/{model}/infer", content=body, headers=headers)


def outputs(reply: httpx2.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    return v2.outputs(reply.content, reply.headers)


def test_requests_with_and_without_an_optional_input_get_their_own_answers(stack: Stack, tmp_path: Path) -> None:
    stack.push("scaled", models.scaled(tmp_path / "m.onnx"))
    metadata = stack.http.get("/v2/models/scaled").json()
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["scale", "x"]

    def ask(number: int) -> bool:
        rows = number % 3 + 1
        x = np.full((rows, 4), number, np.float32)
        scale = np.full((rows, 1), number % 7, np.float32)
        given = {"x": x, "scale": scale} if number % 2 else {"x": x}
        [y] = outputs(infer(stack, "scaled", given)).values()
        return bool((y == x * (scale if number % 2 else 2)).all())

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(200)))
    refused = infer(stack, "scaled", {"scale": np.ones((1, 1), np.float32)})
    assert (refused.status_code, "missing required input(s) ['x']" in refused.json()["error"]) == (400, True)
    call = random_request(metadata, 2, np.random.default_rng(1))  # of all inputs
    reply = stack.http.post("/v2/models/scaled/infer", content=call.body, headers={v2.LENGTH: str(call.header_bytes)})
    assert outputs(reply)["y"].shape == (2, 4)


def spec(name: str, shape: Sequence[int], model_shape: Sequence[int] | None) -> TensorSpec:
    return TensorSpec(
        name=name, datatype="FP32", shape=tuple(shape), model_shape=None if model_shape is None else tuple(model_shape)
    )


def test_clients_may_see_other_shapes_than_the_model(stack: Stack, tmp_path: Path) -> None:
    """mlp takes [N, 64] and gives [N, 10]; its clients see pictures of 8 x 8 and two times five numbers."""
    content = models.mlp(tmp_path / "m.onnx").read_bytes()
    stack.push("flat", tmp_path / "m.onnx")
    digest = hashlib.sha256(content).hexdigest()
    manifest = Manifest(
        model="picture",
        version=1,
        created=time.time(),
        digest=digest,
        served="source/model.onnx",
        files=(SourceFile(path="source/model.onnx", size_bytes=len(content), sha256=digest),),
        signature=Signature(
            inputs=(spec("input", (-1, 8, 8), (64,)),), outputs=(spec("output", (-1, 2, 5), (10,)),), batching=True
        ),
        config=ModelConfig(),
        opset=17,
        ir_version=8,
    )
    repository = FolderRepository(stack.home / "repository")
    with repository.open_staging() as staging:
        (staging.path / "source").mkdir()
        (staging.path / "source" / "model.onnx").write_bytes(content)
        repository.publish(staging, manifest, activate=True)
    stack.settled("picture", 1)
    pixels = np.random.default_rng(3).standard_normal((3, 64)).astype(np.float32)
    seen = outputs(infer(stack, "picture", {"input": pixels.reshape(3, 8, 8)}))["output"]
    assert seen.shape == (3, 2, 5)
    flat = outputs(infer(stack, "flat", {"input": pixels}))["output"]
    np.testing.assert_allclose(seen.reshape(3, 10), flat, rtol=1e-5)
    assert infer(stack, "picture", {"input": pixels}).status_code == 400


def zipped(tmp_path: Path, files: dict[str, bytes]) -> Path:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    path = tmp_path / "m.zip"
    path.write_bytes(buffer.getvalue())
    return path


def warmup(**inputs: object) -> dict[str, object]:
    made = {"datatype": "INT64", "shape": [1], "fill": "file", "file": "source/warm.bin"} | inputs
    return {"name": "first", "rows": 2, "count": 3, "inputs": {"index": made}}


def test_a_version_is_ready_once_it_answered_its_warm_up_and_is_refused_if_it_cannot(
    stack: Stack, tmp_path: Path
) -> None:
    model = models.lookup(tmp_path / "m.onnx").read_bytes()
    config = json.dumps(
        {"warmup": [warmup(), warmup(fill="zero", file=None), warmup(fill="random", file=None, shape=[1])]}
    )
    # random numbers go up to 99: the table has 8
    archive = zipped(tmp_path, {"model.onnx": model, "warm.bin": np.array([1, 2], np.int64).tobytes()})
    where = "/admin/v1/models/warm/versions"
    reply = stack.http.post(where, params={"config": config}, content=archive.read_bytes())
    assert (reply.status_code, "warm-up 'first'" in reply.json()["error"]) == (400, True), reply.text
    good = json.dumps({"warmup": [warmup()]})
    assert stack.push("warm", archive, config=good)["state"] == "ready"
    assert outputs(infer(stack, "warm", {"index": np.array([[3]])}))["y"].tolist() == [[30.0]]
    for wrong, told in (
        (warmup(file="source/none.bin"), "there is no plain file 'source/none.bin'"),
        (warmup(file="../../../endpoint.json"), "there is no plain file"),
        (warmup(shape=[2]), "shape [2] does not fit [1]"),
        (warmup(datatype="FP32"), "datatype 'FP32' in place of INT64"),
        ({**warmup(), "rows": 100}, "rows must be 1 to rows_max, which is 64, not 100"),
        ({**warmup(), "inputs": {}}, "input 'index' is missing"),
        (warmup(fill="zero"), "a file belongs to the fill"),
    ):
        refused = stack.http.post(
            where, params={"config": json.dumps({"warmup": [wrong]})}, content=archive.read_bytes()
        )
        assert refused.status_code == 400 and told in refused.json()["error"], refused.text


def test_few_workers_hold_a_version_that_asks_for_few(stack: Stack, tmp_path: Path) -> None:
    path = models.add_sub(tmp_path / "m.onnx")
    reply = stack.http.post(
        "/admin/v1/models/few/versions",
        params={"wait": 300, "activate": True, "config": json.dumps({"instances_max": 1})},
        content=path.read_bytes(),
    )
    assert reply.status_code == 201
    stack.push("all", path)  # loaded after it: by now the second worker has passed it by
    workers = {worker["id"]: worker for worker in stack.http.get("/admin/v1/workers").json()["workers"]}
    holders = [name for name, worker in workers.items() if "few" in {at["model"] for at in worker["instances"]}]
    assert len(workers) == WORKERS
    assert [name.rsplit("-", 1)[0] for name in holders] == ["cpu-0"]
    ones = np.ones((1, 4), np.float32)
    assert outputs(infer(stack, "few", {"a": ones, "b": ones}))["sum"].tolist() == [[2.0] * 4]


def test_a_queue_policy_refuses_and_counts_as_the_reference_does(stack: Stack, tmp_path: Path) -> None:
    queue = {"timeout_ms_default": 5000, "requests_max": 20}
    terms = {"rows_max": 1, "queue": queue, "instances_max": 1, "timeout_ms_default": 600_000}
    config = json.dumps(terms)
    path = models.slow(tmp_path / "m.onnx", rounds=20_000)  # 100 ms
    reply = stack.http.post(
        "/admin/v1/models/line/versions",
        params={"wait": 300, "activate": True, "config": config},
        content=path.read_bytes(),
    )
    assert reply.json()["state"] == "ready"
    wait_until(lambda: stack.http.get("/v2/models/line/ready").status_code == 200)
    # its timeout of a microsecond says nothing: the version has a policy of its own
    body, headers = v2.request({"x": np.ones((1, 128), np.float32)}, parameters={"timeout": 1})
    pids = stack.pids()
    with sigstopped(*(pids[f"cpu-{index}"] for index in range(WORKERS))):  # nothing runs
        with sigstopped(pids["gateway-0"]):  # it finds all of them at once, however long it takes to send them
            calls = [stack.send("/v2/models/line/infer", body, headers) for _ in range(40)]
        sockets = [call.sock for call in calls]
        # half of them are refused at once, and all but a few when their time is over
        wait_until(lambda: len(select.select(sockets, [], [], 0)[0]) > 30, what="most of them are refused")
    replies = []
    for call in calls:
        answer = call.getresponse()
        replies.append((answer.status, answer.read()))
        call.close()
    statuses = [status for status, _ in replies]
    assert {200, 429, 503} == set(statuses)
    told = {status: json.loads(said)["error"] for status, said in replies if status != 200}
    assert told == {429: "Exceeds maximum queue size", 503: "Request timeout expired"}
    [found] = stack.http.get("/v2/models/line/stats").json()["model_stats"]
    assert found["inference_stats"]["success"]["count"] == statuses.count(200)
    assert found["inference_stats"]["fail"]["count"] == 40 - statuses.count(200)
    rejected = 'nv_inference_request_failure{model="line",reason="REJECTED",version="1"} '
    assert f"{rejected}{40 - statuses.count(200)}\n" in stack.http.get("/metrics").text
