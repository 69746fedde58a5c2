"""Vertex AI's contract: the command of the image with the variables that Vertex AI sets, and its calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx2
import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput

from millstream.plugins.compat.vertex.triton_calls import PREFIX
from millstream.services.cli.commands.serve import storage_folder
from millstream.services.environment import child_environment
from millstream.services.errors import Failure
from millstream.services.settings import read_settings
from tests.kit import models
from tests.kit.application import Application
from tests.kit.ports import free_port
from tests.kit.stack import running_stack
from tests.kit.wait import wait_until

HEALTH = "/v1/endpoints/123/deployedModels/456"
PREDICT = f"{HEALTH}:predict"
REDIRECT = "X-Vertex-Ai-Triton-Redirect"
FACTORS = {"any": 2.0, "other": 3.0}
SERVE = [sys.executable, "-P", "-m", "millstream.services.cli", "serve"]


def test_the_container_starts_as_vertex_starts_it(tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"
    folder.mkdir()
    for name, factor in (("any", 2.0), ("other", 3.0)):
        (folder / name / "1").mkdir(parents=True)
        models.scale(folder / name / "1" / "model.onnx", factor=factor)
        (folder / name / "config.pbtxt").write_text("")
    port = free_port()  # Vertex AI names the port
    environment = {
        "MILLSTREAM_HOME": str(tmp_path / "home"),
        "MILLSTREAM_POOLS": "cpu=1,threads=1",
        "AIP_MODE": "PREDICTION",
        "AIP_HTTP_PORT": str(port),
        "AIP_HEALTH_ROUTE": HEALTH,
        "AIP_PREDICT_ROUTE": PREDICT,
        "AIP_STORAGE_URI": f"file://{folder}",
        "MILLSTREAM_SAGEMAKER_MODEL": "any",
    }
    process = subprocess.Popen(
        [*SERVE, "--grpc-port", "-1"],
        env=child_environment(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if line.startswith("ready http://"))
        assert int(ready.rpartition(":")[2]) == port
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False) as client:
            for headers in ({}, {"Host": "endpoint.platform.example"}):
                wait_until(lambda: client.get(HEALTH, headers=headers).status_code == 200, what="ready")  # noqa: B023
            reply = client.post(PREDICT, json={"instances": [[1, 2], [3, 4]], "parameters": {"confidence": 0.5}})
            assert (reply.status_code, reply.json()) == (200, {"predictions": [[2.0, 4.0], [6.0, 8.0]]})
            tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
            assert client.post(PREDICT, json={"inputs": [tensor]}).json()["outputs"][0]["data"] == [2.0, 4.0]
            assert client.post(PREDICT, json={"instances": []}).status_code == 400
            assert client.post(PREDICT, content=b"{").status_code == 400
            assert client.get(PREDICT).status_code == 405
            assert client.get("/admin/v1/models").status_code == 401
            check_redirects(client)
            check_binary_tensors(client)
    finally:
        process.terminate()
        process.communicate(timeout=300)
    assert process.returncode == 0


def test_redirects_are_followed_on_a_path_that_is_an_infer_path_of_its_own(tmp_path: Path) -> None:
    paths = {name: models.scale(tmp_path / f"{name}.onnx", factor=factor) for name, factor in FACTORS.items()}
    predict = "/v2/models/any/infer"
    with running_stack(tmp_path, models=paths, environment={"AIP_PREDICT_ROUTE": predict}) as stack:
        tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
        for headers, answer in (
            ({}, ("any", [2.0, 4.0])),
            ({REDIRECT: "v2/models/other/infer"}, ("other", [3.0, 6.0])),
        ):
            reply = stack.http.post(predict, json={"inputs": [tensor]}, headers=headers).json()
            assert (reply["model_name"], reply["outputs"][0]["data"]) == answer


def check_redirects(client: httpx2.Client) -> None:
    """Triton's redirect reaches the call that it names, with that call's own method and rights, and nothing else."""
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}

    def redirected(target: str, document: object = None) -> httpx2.Response:
        return client.post(PREDICT, json=document, headers={REDIRECT: target})

    answer = redirected("v2/models/other/infer", {"inputs": [tensor]}).json()
    assert (answer["model_name"], answer["outputs"][0]["data"]) == ("other", [3.0, 6.0])
    assert redirected("v2/models/other/versions/1/infer", {"inputs": [tensor]}).json()["model_version"] == "1"
    assert redirected("v2/models/other").json()["inputs"][0]["name"] == "x"
    assert redirected("v2/models/other/ready").status_code == 200
    assert redirected("v2/health/live").status_code == 200
    assert redirected("v2/models/other/config").json()["name"] == "other"
    assert redirected("v2/models/none/infer", {"inputs": [tensor]}).status_code == 404
    assert redirected("v2/repository/models/other/unload").status_code == 401  # as on its own path
    for target in ("", "/v2", "v2/../admin/v1/models", "admin/v1/models", "v2/models/other/infer?x", "v2/models"):
        refused = redirected(target, {"instances": [[1, 2]]})
        assert (refused.status_code, "redirect" in refused.text.lower()) == (400, True), target
    twice = [(REDIRECT, "v2/models/any"), (REDIRECT, "v2/models/other")]
    assert client.post(PREDICT, headers=twice).status_code == 400


def check_binary_tensors(client: httpx2.Client) -> None:
    """Binary tensors under the content type that Triton has on Vertex AI, both ways, with a redirect and without."""
    tensor = InferInput("x", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.array([[1, 2]], np.float32))
    body, json_bytes = InferenceServerClient.generate_request_body([tensor])
    for headers, answer in (({}, [2.0, 4.0]), ({REDIRECT: "v2/models/other/infer"}, [3.0, 6.0])):
        sent = {"content-type": f"{PREFIX}{json_bytes}", **headers}
        reply = client.post(PREDICT, content=body, headers=sent)
        assert (reply.status_code, reply.headers["content-type"].startswith(PREFIX)) == (200, True), reply.text
        length = int(reply.headers["content-type"].removeprefix(PREFIX))
        result = InferenceServerClient.parse_response_body(reply.content, header_length=length)
        assert result.as_numpy("y").tolist() == [answer]
    for wrong in (f"{PREFIX}-1", f"{PREFIX}", f"{PREFIX}x", f"text/plain, {PREFIX}{json_bytes}", f"{PREFIX}{1 << 30}"):
        assert client.post(PREDICT, content=body, headers={"content-type": wrong}).status_code == 400, wrong


def test_a_bucket_fails_the_start_with_what_to_do(tmp_path: Path) -> None:
    environment = {"MILLSTREAM_HOME": str(tmp_path / "home"), "AIP_STORAGE_URI": "gs://bucket/model"}
    ended = subprocess.run(
        SERVE, env=child_environment(environment), capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode != 0
    assert "gs://" in ended.stderr
    assert "/opt/ml/model" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


def test_the_storage_folder() -> None:
    assert storage_folder("/models") == Path("/models")
    assert storage_folder("file:///models/m") == Path("/models/m")
    with pytest.raises(Failure, match="s3://"):
        storage_folder("s3://bucket/model")


@pytest.mark.parametrize("route", ["predict", "/a b", "/{name}", "/a?b", "/a\n", "https://x/y"])
def test_a_route_that_is_no_path_stops_the_start(monkeypatch: pytest.MonkeyPatch, route: str) -> None:
    monkeypatch.setenv("AIP_PREDICT_ROUTE", route)
    with pytest.raises(Failure, match="AIP_PREDICT_ROUTE"):
        read_settings()


@pytest.mark.anyio
async def test_the_health_route_tells_readiness(tmp_path: Path) -> None:
    application = Application(tmp_path, vertex_health_route="/health", vertex_predict_route="/invocations")
    transport = httpx2.ASGITransport(application.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/health")).status_code == 200
        application.ready = False
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/invocations", json={"instances": [1]})).status_code == 404  # there is no model


@pytest.mark.anyio
async def test_outside_of_vertex_there_are_no_such_paths(tmp_path: Path) -> None:
    transport = httpx2.ASGITransport(Application(tmp_path).app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get(HEALTH)).status_code == 404
        assert "Vertex AI" not in (await client.get("/openapi.json")).text
