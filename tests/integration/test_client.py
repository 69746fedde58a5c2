"""Client and AsyncClient with a running product: each method, as a user's program calls it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from millstream import AsyncClient, Client, Code, ConnectionFailed, Failure, ModelNotFound, ServerError, VersionFailed
from millstream.client.errors import Cause
from millstream.services.model.manifest import Manifest
from tests.kit import models
from tests.kit.blocking import Blocking
from tests.kit.stack import CALL_S_MAX, ROOT, WAIT_S, Stack, running_stack, sigstopped
from tests.kit.wait import wait_until

DIGITS = ROOT / "examples" / "digits"
X = np.array([[1, 2], [3, 4]], np.float32)


@pytest.fixture(params=["blocking", "awaiting"])
def client(request: pytest.FixtureRequest, stack: Stack) -> Iterator[Any]:
    """Both clients, behind the interface of the blocking one."""
    if request.param == "blocking":
        with Client(stack.url, key=stack.key, timeout=CALL_S_MAX) as one:
            yield one
        return
    with asyncio.Runner() as runner:
        other = AsyncClient(stack.url, key=stack.key, timeout=CALL_S_MAX)
        yield Blocking(other, runner)
        runner.run(other.close())


@pytest.fixture
def name(client: Any, stack: Stack, request: pytest.FixtureRequest) -> Iterator[str]:
    """A name of a model for one test, which is deleted after it."""
    one = f"client-{request.node.name.translate(str.maketrans('[]', '--')).strip('-')}"
    yield one
    with contextlib.suppress(ModelNotFound):
        settle(stack, client, one)
        client.remove(one)


def settle(stack: Stack, client: Any, name: str) -> None:
    """Wait until every worker has loaded every version: a file that is deleted while it loads is an error in a log."""
    for version in client.versions(name):
        if version["state"] not in {"failed", "unloaded"}:
            stack.settled(name, version["version"])


def test_from_a_file_to_an_answer_and_back(client, name, stack):
    seen: list[tuple[int, int]] = []
    pushed = client.push(
        name, DIGITS / "digits.onnx", wait_s=WAIT_S, progress=lambda sent, size: seen.append((sent, size))
    )
    assert (pushed["model"], pushed["version"], pushed["state"]) == (name, 1, "ready")
    size_bytes = (DIGITS / "digits.onnx").stat().st_size
    assert seen[-1] == (size_bytes, size_bytes)
    assert client.ready(name)
    assert name in [one["name"] for one in client.models()]
    assert client.model(name)["serving"] == 1
    assert [one["version"] for one in client.versions(name)] == [1]
    assert client.version(name, 1)["digest"] == pushed["digest"]
    assert [spec["name"] for spec in client.metadata(name)["inputs"]] == ["pixels"]

    with np.load(DIGITS / "held_out.npz") as held_out:
        images, labels = held_out["images"][:50], held_out["labels"][:50]
    prediction = client.predict(name, {"pixels": images.astype(np.float32)}, request_id="my-id")
    assert (prediction.model, prediction.version, prediction.request_id) == (name, 1, "my-id")
    assert prediction["probabilities"].shape == (50, 10)
    assert np.mean(prediction["label"] == labels) > 0.9
    chosen = client.predict(name, images[0].tolist(), outputs=["label"])
    assert set(chosen) == {"label"}
    assert chosen.request_id  # made by the server
    assert chosen.request_id != client.predict(name, images[0]).request_id
    assert chosen.array.tolist() == [labels[0]]

    second = client.push(name, DIGITS / "digits.onnx", config={"rows_max": 8}, activate=False, wait_s=WAIT_S)
    assert (second["version"], second["rows_max"], second["active"]) == (2, 8, False)
    assert client.predict(name, images[0]).version == 1
    assert client.predict(name, images[0], version=2).version == 2
    assert client.activate(name, 2)["active"] == 2
    assert client.wait(name)["version"] == 2
    settle(stack, client, name)
    client.remove(name, 1)
    with pytest.raises(ServerError, match="serving") as refused:
        client.push(name, DIGITS / "digits.onnx", version=3, wait_s=WAIT_S)
        client.wait(name, 3)
        settle(stack, client, name)
        client.remove(name, 3)
    assert refused.value.code is Code.CONFLICT
    client.remove(name, 3, force=True)
    client.remove(name)
    with pytest.raises(ModelNotFound) as unknown:
        client.model(name)
    assert (unknown.value.status, unknown.value.code) == (404, Code.NOT_FOUND)


def test_values_are_converted_if_the_datatype_can_represent_them(client, name, tmp_path):
    client.push(
        name, models.identities(tmp_path / "m.onnx", ("FP32", "INT64", "UINT8", "BOOL", "BYTES")), wait_s=WAIT_S
    )
    inputs = {
        "x0": [[1, 2, 3]],
        "x1": np.array([[1.0, -2.0, 3.0]]),
        "x2": np.array([0, 1, 255]),
        "x3": [[True, False, True]],
        "x4": np.array([["a", "ü", ""]]),
    }
    outputs = client.predict(name, inputs)
    assert [outputs[f"y{i}"].tolist() for i in range(5)] == [
        [[1.0, 2.0, 3.0]],
        [[1, -2, 3]],
        [[0, 1, 255]],
        [[True, False, True]],
        [["a", "ü", ""]],
    ]
    assert outputs["y0"].dtype == np.float32
    outputs["y0"][0, 0] = 7  # arrays of a reply may be changed
    for wrong, says in (
        ({"x2": [[0, 1, 256]]}, "do not fit into UINT8"),
        ({"x1": [[0.5, 1, 2]]}, "values with fractions"),
        ({"x1": [[1, 2]]}, r"has shape \[1, 2\], but the model expects \[-1, 3\]"),
        ({"z": [[1]]}, "there is no input 'z'"),
        ([[1, 2, 3]], r"give each by its name \(x0, x1"),
        ({"x0": [["a", "b", "c"]]}, r"text \(such as 'a'\) cannot be sent as FP32"),
        ({"x0": object()}, "input 'x0' is no array: it is a value of type object"),
    ):
        with pytest.raises(Failure, match=says) as failure:
            client.predict(name, inputs | wrong if isinstance(wrong, dict) else wrong)
        assert failure.value.code is Code.INVALID
    with pytest.raises(Failure, match="5 outputs: choose one"):
        _ = outputs.array
    with pytest.raises(ServerError) as missing:
        client.predict(name, {"x0": [[1, 2, 3]]})
    assert missing.value.status == 400


def test_another_signature_under_the_same_name_is_noticed(client, name, tmp_path):
    client.push(name, models.scale(tmp_path / "a.onnx", columns=2), wait_s=WAIT_S)
    assert client.predict(name, X)["y"].tolist() == (2 * X).tolist()
    client.push(name, models.scale(tmp_path / "b.onnx", columns=3), wait_s=WAIT_S)
    client.wait(name)
    three = np.ones((1, 3), np.float32)
    assert client.predict(name, three)["y"].tolist() == [[2, 2, 2]]
    with pytest.raises(Failure, match=r"expects \[-1, 3\]"):
        client.predict(name, X)


def test_documents_go_through_unchanged(client, name, tmp_path):
    client.push(name, models.scale(tmp_path / "m.onnx"), wait_s=WAIT_S)
    request = {"id": "a", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
    reply = client.predict_json(name, request)
    assert (reply["id"], reply["outputs"][0]["data"]) == ("a", [2, 4])
    assert client.predict_json(name, request, version=1)["model_version"] == "1"
    with pytest.raises(Failure, match="not JSON"):
        client.predict_json(name, {"inputs": object()})


def test_a_folder_is_uploaded_with_its_external_data(client, name, tmp_path):
    model = onnx.load(models.mlp(tmp_path / "whole.onnx"))
    folder = tmp_path / "model"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "other.onnx").write_bytes(b"not a part of the model")
    onnx.save_model(model, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    pushed = client.push(name, folder, wait_s=WAIT_S)
    assert pushed["state"] == "ready"
    assert client.predict(name, np.zeros((2, 64)))["output"].shape == (2, 10)
    assert client.push(name, str(folder))["digest"] == pushed["digest"]
    (tmp_path / "empty").mkdir()
    for path, says in (
        (tmp_path / "empty", "there is no model in this folder: it has no files"),
        (tmp_path / "nowhere.onnx", "there is no such file"),
        (Path("/dev/null"), "neither a file nor a folder"),
    ):
        with pytest.raises(Failure, match=says):
            client.push(name, path)


def test_the_command_uploads_a_folder(stack, tmp_path):
    model = onnx.load(models.mlp(tmp_path / "whole.onnx"))
    folder = tmp_path / "model ü"
    folder.mkdir()
    onnx.save_model(model, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    command = [sys.executable, "-m", "millstream.services.cli", "--endpoint", stack.url, "--key", stack.key]
    done = subprocess.run([*command, "push", "by-command", folder, "--json"], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    document = json.loads(done.stdout)
    assert (document["state"], document["version"]) == ("ready", 1)
    with Client(stack.url, key=stack.key) as client:
        assert client.version("by-command", 1)["digest"] == document["digest"]
        settle(stack, client, "by-command")
        client.remove("by-command")


def test_a_rejected_upload_says_why(client, name, tmp_path):
    (tmp_path / "text.onnx").write_bytes(b"\0noise" * 100)
    with pytest.raises(ServerError) as error:
        client.push(name, tmp_path / "text.onnx")
    assert error.value.status == 400
    assert "not an ONNX model" in error.value.message
    for method in (client.model, client.metadata, client.remove, client.ready):
        for wrong in ("a/b", "a b", "ü", "", "../x"):
            with pytest.raises(Failure, match="is not allowed: use 1 to 128 letters"):
                method(wrong)
    with pytest.raises(Failure, match="'a/b' is not allowed"):
        client.push("a/b", DIGITS / "digits.onnx")
    with pytest.raises(ServerError, match="rows"):
        client.push(name, DIGITS / "digits.onnx", config={"rows": 1})


def test_load_and_unload(client, name):
    client.push(name, DIGITS / "digits.onnx", wait_s=WAIT_S)
    client.unload(name)
    with pytest.raises(Failure, match="is unloaded"):
        client.wait(name)
    with pytest.raises(ModelNotFound):
        client.ready(name)
    client.load(name, config={"max_batch_size": 8})
    assert client.wait(name)["rows_max"] == 8
    with pytest.raises(ServerError, match="is negative"):
        client.load(name, config='{"max_batch_size": -1}')


def test_questions_about_the_server(client, name, stack):
    client.push(name, DIGITS / "digits.onnx", wait_s=WAIT_S)
    assert client.live()
    wait_until(client.ready, what="the server is ready")
    assert client.server_version()
    assert [pool["name"] for pool in client.pools()] == ["cpu"]
    assert len(client.workers()) == 2
    labels = {"model": name}
    before = client.metrics().value("millstream_batch_rows_sum", **labels)
    client.predict(name, np.zeros((3, 64)))
    # A worker counts a batch after it sent the replies.
    wait_until(
        lambda: client.metrics().value("millstream_batch_rows_sum", **labels) >= before + 3, what="it is counted"
    )
    metrics = client.metrics()
    assert {sample.labels["model"] for sample in metrics.select("millstream_batch_rows_count", **labels)} == {name}
    assert metrics.value("millstream_nothing") == 0
    reply = client.request("GET", "/v2/health/live")
    assert (reply.status, stack.url in reply.url) == (200, True)
    with pytest.raises(ServerError) as error:
        client.request("GET", "/nowhere")
    assert type(error.value) is ServerError
    assert error.value.status == 404


def test_a_slow_model_and_a_short_timeout(client, name, stack, tmp_path):
    client.push(name, models.scale(tmp_path / "m.onnx"), wait_s=WAIT_S)
    client.predict(name, X)
    workers = [pid for process, pid in stack.pids().items() if process.startswith("cpu-")]
    with sigstopped(*workers), pytest.raises(Failure) as error:
        client.predict(name, X, timeout=0.3)
    assert error.value.code is Code.EXPIRED
    assert client.predict(name, X)["y"].tolist() == (2 * X).tolist()


def test_a_request_that_is_too_large_says_so(client, name, tmp_path):
    client.push(name, models.scale(tmp_path / "m.onnx"), wait_s=WAIT_S)
    with pytest.raises(ServerError, match="67108864") as error:
        client.predict(name, np.zeros((10_000_000, 2), np.float32))
    assert (error.value.status, error.value.code) == (413, Code.TOO_LARGE)
    assert client.predict(name, X)["y"].tolist() == (2 * X).tolist()


def test_the_grpc_port_is_recognised(client, stack):
    host, _, port = stack.grpc.rpartition(":")
    with Client(f"http://{host}:{port}", retries=0) as wrong, pytest.raises(ConnectionFailed) as error:
        wrong.models()
    assert error.value.cause is Cause.PROTOCOL
    assert "is the gRPC port, which speaks HTTP/2 only; HTTP is usually on port 8000" in error.value.message


def test_tls_to_a_gateway_without_it_is_recognised(stack):
    url = stack.url.replace("http://", "https://")
    with Client(url, retries=0) as wrong, pytest.raises(ConnectionFailed) as error:
        wrong.models()
    assert error.value.cause is Cause.TLS
    assert "speaks plain HTTP, not TLS: write http:// instead of https://" in error.value.message


def test_threads_share_a_client(stack, tmp_path):
    with Client(stack.url, key=stack.key, timeout=CALL_S_MAX) as client:
        client.push("threads", models.scale(tmp_path / "m.onnx"), wait_s=WAIT_S)

        def ask(number: int) -> bool:
            return bool(client.predict("threads", X * number)["y"].tolist() == (2 * number * X).tolist())

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(ask, range(300)))
        settle(stack, client, "threads")
        client.remove("threads")


def test_tasks_share_a_client(stack, tmp_path):
    async def main() -> None:
        async with AsyncClient(stack.url, key=stack.key, timeout=CALL_S_MAX) as client:
            await client.push("tasks", models.scale(tmp_path / "m.onnx"), wait_s=WAIT_S)
            answers = await asyncio.gather(*(client.predict("tasks", X * number) for number in range(300)))
            assert all(answer["y"].tolist() == (2 * number * X).tolist() for number, answer in enumerate(answers))
            task = asyncio.create_task(client.predict("tasks", X))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await client.predict("tasks", X))["y"].tolist() == (2 * X).tolist()
            stack.settled("tasks", 1)
            await client.remove("tasks")

    asyncio.run(main())


def test_a_closed_client_leaves_nothing_open(stack):
    client = Client(stack.url, key=stack.key)
    assert client.live()
    client.close()
    client.close()
    del client
    gc.collect()  # an open socket would be a ResourceWarning, which is an error here


def test_keys_and_named_endpoints(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for variable in ("MILLSTREAM_ENDPOINT", "MILLSTREAM_ADMIN_KEY"):
        monkeypatch.delenv(variable, raising=False)
    with running_stack(tmp_path, settings={"admin_key": "secret"}) as stack:
        config = tmp_path / "config" / "millstream" / "config.toml"
        config.parent.mkdir(parents=True)
        config.write_text(f'[endpoints.mine]\nurl = "{stack.url}"\napi_key_file = "mine.key"\n')
        (config.parent / "mine.key").write_text("secret\n")
        (config.parent / "mine.key").chmod(0o600)
        with Client("mine") as client:
            assert client.models() == []
        for wrong in (None, "wrong"):
            with Client(stack.url, key=wrong) as client, pytest.raises(ServerError, match="_ADMIN_KEY") as error:
                client.models()
            assert error.value.code is Code.UNAUTHENTICATED
        with Client(stack.url, key="secret") as client:
            assert client.models() == []
        (config.parent / "mine.key").chmod(0o644)
        with pytest.warns(UserWarning, match=r"mine.key: chmod 600"), Client("mine") as client:
            assert client.live()


def test_wait_names_the_reason_of_a_failure(tmp_path, monkeypatch):
    """The file of the version is damaged between its upload and its load."""
    with running_stack(tmp_path) as stack, Client(stack.url, key=stack.key) as client:
        worker = stack.pids()["cpu-0"]
        with sigstopped(worker):
            pushed = client.push("damaged", models.scale(tmp_path / "m.onnx"))
            assert pushed["state"] != "ready"
            with pytest.raises(Failure, match=r"damaged version 1 is still \w+ after 2 s: has pool cpu a worker\?"):
                client.wait("damaged", timeout=2)
            folder = stack.home / "repository" / "models" / "damaged" / "1"
            served = folder / Manifest.model_validate_json((folder / "manifest.json").read_bytes()).served
            content = bytearray(served.read_bytes())
            content[-1] ^= 1
            served.chmod(0o600)
            served.write_bytes(content)
        with pytest.raises(VersionFailed, match=r"damaged version 1 failed: .*sha256 differs") as failed:
            client.wait("damaged", 1, timeout=WAIT_S)
        assert (failed.value.model, failed.value.version) == ("damaged", 1)
