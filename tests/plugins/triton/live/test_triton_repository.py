"""A Triton model repository served in place, and models loaded and unloaded by clients: through a real server."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import onnx
import onnxruntime
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.kit import models
from tests.kit.load import constant_load
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.wait import wait_until

LABELS = "cat\ndog\n"
REPLY_S_MAX = 300.0  # the client gives up after a minute unless told otherwise


def times(path: Path, factor: float, *, outside: bool = False) -> Path:
    """ "x" FP32 [N, 2] -> "y" = factor * x; `outside`: the factor is in a file beside it."""
    value = onnx.numpy_helper.from_array(np.full(2, factor, np.float32), "factor")
    shape: list[str | int | None] = ["N", 2]
    tensor = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Mul", ["x", "factor"], ["y"])],
        "graph",
        [tensor("x", onnx.TensorProto.FLOAT, shape)],
        [tensor("y", onnx.TensorProto.FLOAT, shape)],
        [value],
    )
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    if outside:
        onnx.save_model(made, str(path), save_as_external_data=True, location="factor.bin", size_threshold=0)
    else:
        path.write_bytes(made.SerializeToString())
    return path


def lay_out(folder: Path) -> Path:
    """Models: scale (versions 1 to 3 and folders that are none), plain (no configuration), alone, broken, worse."""
    for version in (1, 2, 3):
        times(folder / "scale" / str(version) / "model.onnx", version, outside=version == 2)
    for ignored in ("0", "old", ".git"):
        times(folder / "scale" / ignored / "model.onnx", 99)
    (folder / "scale" / "labels.txt").write_text(LABELS)
    (folder / "scale" / "warmup").mkdir()
    (folder / "scale" / "warmup" / "raw").write_bytes(np.ones(2, np.float32).tobytes())
    (folder / "scale" / "config.pbtxt").write_text(
        """
        name: "scale"
        platform: "onnxruntime_onnx"
        max_batch_size: 8
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" } ]
        version_policy { specific { versions: [ 2, 3 ] } }
        dynamic_batching { max_queue_delay_microseconds: 100 }
        model_warmup [ { name: "one" batch_size: 1
          inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 2 ] input_data_file: "raw" } } } ]
        parameters { key: "mine" value { string_value: "own" } }
        """
    )
    for version in (4, 5):
        times(folder / "plain" / str(version) / "model.onnx", version)
    (folder / "alone" / "1").mkdir(parents=True)
    models.transpose(folder / "alone" / "1" / "model.onnx")
    (folder / "broken" / "1").mkdir(parents=True)
    (folder / "broken" / "1" / "model.onnx").write_bytes(b"this is no model")
    times(folder / "worse" / "1" / "model.onnx", 1)
    (folder / "worse" / "config.pbtxt").write_text(
        'backend: "dali" sequence_batching { } model_transaction_policy { decoupled: true }'
    )
    return folder


def content(folder: Path) -> dict[str, tuple[str, float, int]]:
    """Every file below `folder`: its digest, when it was changed, and how many names it has."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime,
            path.stat().st_nlink,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def stack(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"triton_repositories": repository, "open_control": True}
    with running_stack(tmp_path_factory.mktemp("stack"), gateways=2, pools="cpu=2", settings=settings) as stack:
        yield stack


def connected(stack: Stack) -> Any:
    where = stack.url.removeprefix("http://")
    return triton.InferenceServerClient(where, connection_timeout=REPLY_S_MAX, network_timeout=REPLY_S_MAX)


@pytest.fixture
def client(stack: Stack) -> Iterator[Any]:
    with connected(stack) as client:
        yield client


def scaled(client: Any, model: str, version: str = "") -> float:
    """What the model multiplies by."""
    given = triton.InferInput("x", [1, 2], "FP32")
    given.set_data_from_numpy(np.ones((1, 2), np.float32))
    return float(client.infer(model, [given], model_version=version).as_numpy("y")[0, 0])


def index(client: Any) -> dict[tuple[str, str], tuple[str, str]]:
    """(model, version) -> (state, reason)."""
    found = client.get_model_repository_index()
    return {(one["name"], one.get("version", "")): (one.get("state", ""), one.get("reason", "")) for one in found}


def refusal(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        call(*arguments, **named)
    return str(caught.value)


def everywhere(stack: Stack, path: str, status: int) -> None:
    """Wait until every gateway answers `path` with `status`."""
    for number in range(stack.gateways):
        with stack.gateway(number) as gateway:
            wait_until(lambda: gateway.get(path).status_code == status, what=f"{path} is {status}")


def test_a_repository_in_place(stack: Stack, client: Any, repository: Path) -> None:
    before = content(repository)
    served = [("scale", "2"), ("scale", "3"), ("plain", "5"), ("alone", "1")]
    wait_until(lambda: all(index(client)[one] == ("READY", "") for one in served), what="this gateway knows them")
    found = index(client)
    assert ("scale", "1") not in found
    assert ("plain", "4") not in found
    state, reason = found["broken", ""]
    assert state == "UNAVAILABLE"
    assert "failed to load 'broken', version 1: this is text, not an ONNX model" in reason
    for field in ("backend 'dali'", "sequence_batching", "model_transaction_policy.decoupled"):
        assert f"{field} is not supported" in found["worse", ""][1], "every field, not the first"
        assert f"{field} is not supported" in "\n".join(stack.lines)
    assert "broken is not served" in "\n".join(stack.lines)
    assert "scale version 2, 3, in place in" in "\n".join(stack.lines)

    assert (scaled(client, "scale"), scaled(client, "scale", "2"), scaled(client, "plain")) == (3, 2, 5)
    for version in ("1", "0", "4"):
        assert "not found" in refusal(scaled, client, "scale", version)
    metadata = client.get_model_metadata("scale")
    assert metadata["versions"] == ["2", "3"]
    assert client.get_model_metadata("alone")["inputs"][0]["shape"] == [3, 4]

    home = stack.home / "repository"
    assert [path for path in home.rglob("*") if path.suffix in {".onnx", ".bin"}] == []
    assert content(repository) == before
    manifest = json.loads((home / "models" / "scale" / "2" / "manifest.json").read_text())
    assert {file["path"] for file in manifest["files"]} == {
        "2/model.onnx",
        "2/factor.bin",
        "labels.txt",
        "warmup/raw",
    }
    assert manifest["config"]["labels"] == {"y": "labels.txt"}
    assert manifest["config"]["warmup"][0]["inputs"]["x"]["file"] == "warmup/raw"
    assert stack.http.get("/admin/v1/models/scale").json()["source"] == str(repository)


def test_the_configuration_of_every_version(stack: Stack, client: Any) -> None:
    config = client.get_model_config("scale", "2")
    assert config == client.get_model_config("scale")
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("scale", "onnxruntime", 8)
    assert config["output"][0]["label_filename"] == "labels.txt"
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert config["version_policy"] == {"specific": {"versions": [2, 3]}}
    assert config["parameters"] == {"mine": {"string_value": "own"}}
    assert client.get_model_config("plain")["max_batch_size"] == 64
    assert client.get_model_config("alone")["max_batch_size"] == 0
    assert "'nope' is not found" in refusal(client.get_model_config, "nope")
    assert "version 1 is not found" in refusal(client.get_model_config, "scale", "1")
    assert "failed to load" not in stack.http.get("/v2/models/broken/config").text


def test_a_load_reads_the_folder_again(stack: Stack, client: Any, repository: Path) -> None:
    times(repository / "grown" / "5" / "model.onnx", 5)
    client.load_model("grown")
    manifest = stack.home / "repository" / "models" / "grown" / "5" / "manifest.json"
    before = manifest.read_bytes()
    client.load_model("grown")
    assert manifest.read_bytes() == before  # nothing changed: nothing was loaded

    new = repository / "grown" / "6"
    times(new / "model.onnx", 6)
    assert scaled(client, "grown") == 5
    client.load_model("grown")
    assert scaled(client, "grown") == 6
    everywhere(stack, "/v2/models/grown/versions/5", 404)
    wait_until(lambda: not manifest.exists(), what="its manifest is removed")

    worse = repository / "grown" / "7"
    worse.mkdir()
    said = refusal(client.load_model, "grown")
    assert "failed to load 'grown', version 7: the file 7/model.onnx does not exist" in said
    (worse / "model.onnx").write_bytes(b"no model")
    assert "failed to load 'grown', version 7: this is text, not an ONNX model" in refusal(client.load_model, "grown")
    assert scaled(client, "grown") == 6
    assert "version 7" in index(client)["grown", "6"][1]
    (worse / "model.onnx").unlink()
    worse.rmdir()
    client.load_model("grown")
    assert index(client)["grown", "6"] == ("READY", "")

    times(repository / "mended" / "1" / "model.onnx", 1)
    (repository / "mended" / "config.pbtxt").write_text("sequence_batching { }")
    assert "sequence_batching is not supported" in refusal(client.load_model, "mended")
    (repository / "mended" / "config.pbtxt").write_text("max_batch_size: 2")
    client.load_model("mended")
    assert scaled(client, "mended") == 1
    times(repository / "later" / "1" / "model.onnx", 7)
    assert index(client)["later", ""] == ("", "")
    client.load_model("later")
    assert scaled(client, "later") == 7


def test_a_configuration_that_comes_with_the_load(client: Any) -> None:
    client.load_model("scale", config=json.dumps({"maxBatchSize": "4", "versionPolicy": {"all": {}}}))
    config = client.get_model_config("scale")
    assert (config["max_batch_size"], config["version_policy"]) == (4, {"all": {}})
    assert [scaled(client, "scale", version) for version in ("1", "2", "3")] == [1, 2, 3]
    for bad, words in (
        ('{"max_batch_size": "x"}', "failed to poll from model repository: config: "),
        ("{", "not JSON"),
        ('{"input": [{"name": "q", "data_type": "TYPE_FP32", "dims": [2]}]}', "unexpected input 'q'"),
        ('{"ensemble_scheduling": {}}', "ensemble scheduling cannot be set for model 'scale' whose platform is not"),
        ('{"name": "other"}', "name must be 'scale' or absent"),
        ('{"version_policy": {"specific": {"versions": ["9"]}}}', "names 9, but the model has no such version"),
    ):
        said = refusal(client.load_model, "scale", config=bad)
        assert said.startswith("[400] failed to load 'scale', "), said
        assert words in said
        assert scaled(client, "scale", "1") == 1
    client.load_model("scale")
    assert client.get_model_config("scale")["max_batch_size"] == 8
    assert "not found" in refusal(scaled, client, "scale", "1")


def test_the_configuration_gives_what_the_file_does_not_say(client: Any, repository: Path, tmp_path: Path) -> None:
    """Shapes of unknown rank, and an input with a stored value that only the configuration tells from a weight."""
    model = onnx.load_model(models.scaled(tmp_path / "scaled.onnx"))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    lists = 'input [{name: "x" data_type: TYPE_FP32 dims: [4]} %s] output [{name: "y" data_type: TYPE_FP32 dims: [4]}]'
    scale = ', {name: "scale" data_type: TYPE_FP32 dims: [1, 1] optional: true}'
    whole = lists.replace("dims: [4]", "dims: [-1, 4]")
    for name, text in (("open", whole % ""), ("batched", "max_batch_size: 4 " + lists % "")):
        write(repository / name, model, text)
    model.graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info("scale", onnx.TensorProto.FLOAT, [1, 1]))
    write(repository / "default", model, whole % scale)
    write(repository / "weight", model, whole % "")
    x, two = triton.InferInput("x", [1, 4], "FP32"), triton.InferInput("scale", [1, 1], "FP32")
    x.set_data_from_numpy(np.ones((1, 4), np.float32))
    two.set_data_from_numpy(np.full((1, 1), 3, np.float32))
    for name, inputs, answer in (
        ("open", [x], 2),
        ("batched", [x], 2),
        ("default", [x], 2),
        ("default", [x, two], 3),
        ("weight", [x], 2),
    ):
        client.load_model(name)
        assert client.infer(name, inputs).as_numpy("y").max() == answer, name
    assert "unexpected inference input 'scale'" in refusal(client.infer, "weight", [x, two])


def write(folder: Path, model: onnx.ModelProto, configuration: str) -> None:
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(configuration)


def test_an_input_that_the_model_needs_cannot_be_optional(client: Any, repository: Path, tmp_path: Path) -> None:
    model = onnx.load_model(models.add_sub(tmp_path / "m.onnx"))
    inputs = 'input [{name: "a" data_type: TYPE_FP32 dims: [4]}, {name: "b" data_type: TYPE_FP32 dims: [4] %s}]'
    write(repository / "lacking", model, "max_batch_size: 4 " + inputs % "optional: true")
    said = refusal(client.load_model, "lacking")
    assert "input 'b': optional is true, but the model needs it: the file has no value for it" in said
    (repository / "lacking" / "config.pbtxt").write_text("max_batch_size: 4 " + inputs % "")
    client.load_model("lacking")


@pytest.mark.parametrize("dynamic", ["", "dynamic_batching { }"])
def test_rows_that_influence_each_other_run_unmerged(
    stack: Stack, client: Any, repository: Path, tmp_path: Path, dynamic: str
) -> None:
    """As Triton runs them without dynamic_batching: each request alone, with all its rows."""
    name = f"mixing-{len(dynamic)}"
    model = onnx.load_model(models.row_mixing(tmp_path / "m.onnx", "N"))
    io = 'input {name: "x" data_type: TYPE_FP32 dims: [4]} output {name: "y" data_type: TYPE_FP32 dims: [4]}'
    write(repository / name, model, f"max_batch_size: 4 {dynamic} {io}")
    client.load_model(name)
    document = stack.http.get(f"/admin/v1/models/{name}/versions/1").json()
    assert (document["batching"], document["batching_decided"]) == (False, "unmerged")
    assert document["notes"][0].startswith("Each request runs alone, as in Triton without dynamic_batching: output 'y'")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")

    def ask(rows: int) -> None:
        x = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)
        given = triton.InferInput("x", list(x.shape), "FP32")
        given.set_data_from_numpy(x)
        with connected(stack) as one:
            np.testing.assert_array_equal(one.infer(name, [given]).as_numpy("y"), session.run(None, {"x": x})[0])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, [1, 2, 3, 4] * 8))
    given = triton.InferInput("x", [5, 4], "FP32")
    given.set_data_from_numpy(np.ones((5, 4), np.float32))
    assert "batch-size must be <= 4" in refusal(client.infer, name, [given])


def test_labels_warm_up_and_reshape_act(client: Any, repository: Path) -> None:
    given = triton.InferInput("x", [1, 2], "FP32")
    given.set_data_from_numpy(np.array([[1, 2]], np.float32))
    wanted = triton.InferRequestedOutput("y", class_count=1)
    assert client.infer("scale", [given], outputs=[wanted]).as_numpy("y").tolist() == [[b"6.000000:1:dog"]]

    warm_up = {
        "name": "w",
        "batch_size": 1,
        "inputs": {"x": {"data_type": "TYPE_FP32", "dims": [2], "input_data_file": "short"}},
    }
    config = json.dumps({"max_batch_size": 2, "model_warmup": [warm_up]})
    assert "there is no file warmup/short" in refusal(client.load_model, "scale", config=config)
    (repository / "scale" / "warmup" / "short").write_bytes(b"four")
    said = refusal(client.load_model, "scale", config=config)
    assert "failed to load 'scale', version 3: " in said
    assert str(repository) not in said
    assert scaled(client, "scale") == 3
    (repository / "scale" / "warmup" / "short").unlink()

    tensor = {"name": "x", "data_type": "TYPE_FP32", "dims": [1, 2, 1], "reshape": {"shape": [2]}}
    client.load_model("scale", config=json.dumps({"max_batch_size": 2, "input": [tensor]}))
    assert client.get_model_metadata("scale")["inputs"][0]["shape"] == [-1, 1, 2, 1]
    given = triton.InferInput("x", [1, 1, 2, 1], "FP32")
    given.set_data_from_numpy(np.ones((1, 1, 2, 1), np.float32))
    assert client.infer("scale", [given]).as_numpy("y").tolist() == [[3, 3]]
    client.load_model("scale")


def test_files_that_come_with_the_load(stack: Stack, client: Any, repository: Path, tmp_path: Path) -> None:
    times(repository / "own" / "1" / "model.onnx", 7)
    before = content(repository)
    files = {"file:1/model.onnx": times(tmp_path / "model.onnx", 11).read_bytes()}
    assert "without a config" in refusal(client.load_model, "fresh", files=files)
    client.load_model("fresh", config="{}", files=files)
    assert scaled(client, "fresh") == 11
    assert index(client)["fresh", "1"] == ("READY", "")

    labels = json.dumps({"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [2], "label_filename": "l.txt"}]})
    assert "there is no file l.txt" in refusal(client.load_model, "fresh", config=labels, files=files)
    client.load_model("fresh", config=labels, files=files | {"file:l.txt": b"a\nb\n"})
    assert client.get_model_config("fresh")["output"][0]["label_filename"] == "l.txt"
    assert len(list((stack.home / "repository" / "models" / "fresh" / "added_files").iterdir())) == 1

    client.load_model("own", config="{}", files={"file:3/model.onnx": times(tmp_path / "b.onnx", 13).read_bytes()})
    assert scaled(client, "own") == 13
    assert "not found" in refusal(scaled, client, "own", "1")
    client.load_model("own")
    assert scaled(client, "own") == 7
    assert not (stack.home / "repository" / "models" / "own" / "added_files").exists()

    for path in ("../1/model.onnx", "/1/model.onnx", "1//model.onnx", "1/./model.onnx", "", "a\\b", "x" * 300):
        given = {"file:1/model.onnx": b"x", f"file:{path}": b"x"}
        assert "failed to load 'fresh'" in refusal(client.load_model, "fresh", config="{}", files=given)
    both = {"file:1/model.onnx": b"x", "file:1": b"x"}
    assert "both a file and a folder" in refusal(client.load_model, "fresh", config="{}", files=both)
    assert "failed to load 'fresh'" in refusal(
        client.load_model, "fresh", config="{}", files={"file:1/model.onnx": b"no"}
    )
    assert scaled(client, "fresh") == 11
    assert content(repository) == before


def test_a_load_right_after_an_unload_answers_when_the_model_is_ready(
    stack: Stack, client: Any, tmp_path: Path
) -> None:
    stack.push("again", times(tmp_path / "again.onnx", 5))
    where = "/v2/repository/models/again"
    with stack.gateway(0) as gateway:  # the other one may hear of it later
        for _ in range(5):
            assert gateway.post(f"{where}/unload").status_code == 200
            assert gateway.post(f"{where}/load").status_code == 200
            # Workers that still hold it from before unload it: an answer may not wait for that.
            workers = gateway.get("/admin/v1/workers").json()["workers"]
            states = {one["state"] for worker in workers for one in worker["instances"] if one["model"] == "again"}
            assert "ready" in states
            assert "draining" not in states
            wait_until(lambda: gateway.get("/v2/models/again/ready").status_code == 200, what="it is ready")
            assert scaled(client, "again") == 5
    stack.http.delete("/admin/v1/models/again")


def test_a_load_waits_for_a_worker_that_has_not_heard_of_the_unload(stack: Stack, tmp_path: Path) -> None:
    stack.push("again", times(tmp_path / "again.onnx", 5))
    where = "/v2/repository/models/again"
    with ThreadPoolExecutor(1) as threads:
        with sigstopped(*(pid for name, pid in stack.pids().items() if name.startswith("cpu-"))):
            assert stack.http.post(f"{where}/unload").status_code == 200
            loading = threads.submit(lambda: stack.http.post(f"{where}/load"))
            with pytest.raises(TimeoutError):  # its record still says that it is ready
                loading.result(1)
        assert loading.result(120).status_code == 200
    stack.http.delete("/admin/v1/models/again")


def test_uploaded_models_are_unloaded_and_loaded(stack: Stack, client: Any, tmp_path: Path) -> None:
    for version in (1, 2):
        stack.push("sent", times(tmp_path / "model.onnx", version))
    client.unload_model("sent")
    for path in ("/v2/models/sent", "/v2/models/sent/versions/1", "/v2/models/sent/ready", "/v2/models/sent/config"):
        everywhere(stack, path, 404)
    assert "Request for unknown model" in refusal(scaled, client, "sent")
    wait_until(lambda: index(client)["sent", "1"] == ("UNAVAILABLE", "unloaded"), what="it is unloaded")
    ready = stack.http.post("/v2/repository/index", json={"ready": True}).json()
    assert {one["state"] for one in ready} == {"READY"}
    assert "sent" not in {one["name"] for one in ready}
    document = stack.http.get("/admin/v1/models/sent").json()
    assert document["unloaded"]
    assert [one["state"] for one in document["versions"]] == ["unloaded", "unloaded"]

    client.load_model(
        "sent", config=json.dumps({"version_policy": {"specific": {"versions": [1]}}, "max_batch_size": 3})
    )
    assert scaled(client, "sent") == 1
    assert client.get_model_config("sent")["max_batch_size"] == 3
    assert "not found" in refusal(scaled, client, "sent", "2")
    client.load_model("sent")
    assert [scaled(client, "sent", version) for version in ("", "1", "2")] == [1, 1, 2]
    assert client.get_model_config("sent", "1")["max_batch_size"] == 64

    client.unload_model("sent")
    stack.push("sent", times(tmp_path / "model.onnx", 3))  # what is uploaded and activated is served
    assert scaled(client, "sent") == 3
    assert "not found" in refusal(scaled, client, "sent", "2")
    assert stack.http.post("/admin/v1/models/sent/versions/2/activate").status_code == 200
    stack.settled("sent", 2)
    wait_until(lambda: stack.http.get("/v2/models/sent").json()["versions"] == ["2", "3"], what="two versions")
    client.unload_model("nope")
    client.unload_model("no such name")


def test_requests_on_their_way_are_answered(stack: Stack, client: Any, tmp_path: Path) -> None:
    stack.push("slow", models.slow(tmp_path / "slow.onnx"))
    (spec,) = client.get_model_metadata("slow")["inputs"]
    shape = [1, *(2 if dim < 0 else dim for dim in spec["shape"][1:])]
    tensor = {"name": spec["name"], "shape": shape, "datatype": spec["datatype"], "data": [0.5] * int(np.prod(shape))}
    with sigstopped(*(pid for name, pid in stack.pids().items() if name.startswith("cpu-"))):
        body = json.dumps({"inputs": [tensor], "parameters": {"timeout": 600_000_000}}).encode()
        on_the_way = [stack.send("/v2/models/slow/infer", body) for _ in range(24)]
        wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= 24, what="they are on their way")
        client.unload_model("slow")
    assert [connection.getresponse().status for connection in on_the_way] == [200] * 24
    for connection in on_the_way:
        connection.close()


def test_names_that_are_taken(stack: Stack, client: Any, repository: Path, tmp_path: Path) -> None:
    reply = stack.http.post("/admin/v1/models/plain/versions", content=times(tmp_path / "m.onnx", 1).read_bytes())
    assert reply.status_code == 409
    assert f"served from {repository}" in reply.json()["error"]

    stack.push("both", tmp_path / "m.onnx")
    times(repository / "both" / "1" / "model.onnx", 21)
    assert "an uploaded model has this name: delete it" in refusal(client.load_model, "both")
    assert scaled(client, "both") == 1
    assert stack.http.delete("/admin/v1/models/both").status_code == 204
    client.load_model("both")
    assert scaled(client, "both") == 21
    assert stack.http.delete("/admin/v1/models/both").status_code == 204
    assert (repository / "both" / "1" / "model.onnx").exists()
    assert index(client)["both", ""] == ("", "")
    client.load_model("both")


def test_damage_is_found_and_mended_by_a_load(stack: Stack, client: Any, repository: Path) -> None:
    times(repository / "hurt" / "1" / "model.onnx", 21)
    client.load_model("hurt")
    times(repository / "hurt" / "1" / "model.onnx", 22)
    assert scaled(client, "hurt") == 21  # what is loaded stays loaded
    for name, pid in stack.pids().items():
        if name.startswith("cpu-"):
            os.kill(pid, signal.SIGKILL)

    def found() -> bool:  # in one answer: meanwhile the other worker starts, and the model is loading again
        state, reason = index(client)["hurt", "1"]
        return (
            state == "UNAVAILABLE"
            and "damaged: 1/model.onnx is not the file" in reason
            and f"it was overwritten in {repository / 'hurt'}: `millstream load hurt`, or POST /v2/rep" in reason
        )

    wait_until(found, what="the damage is found")
    client.load_model("hurt")
    assert scaled(client, "hurt") == 22


def test_all_gateways_know_at_once(stack: Stack) -> None:
    """A change waits two seconds for the other gateway, so of many changes one that is held up may hear late of one."""
    at_once = []

    def hears(gateway: httpx2.Client, status: int) -> None:
        """Wait until a gateway answers with `status`, and note whether it did at once."""
        path = "/v2/models/scale/versions/2"
        at_once.append(gateway.get(path).status_code == status)
        wait_until(lambda: gateway.get(path).status_code == status, what=f"{path} is {status}")

    with stack.gateway(0) as one, stack.gateway(1) as other:
        for _ in range(5):
            assert one.post("/v2/repository/models/scale/unload").status_code == 200
            hears(other, 404)
            loaded = other.post("/v2/repository/models/scale/load").json()
            assert loaded == {"name": "scale", "load": True, "versions": ["2", "3"]}
            hears(one, 200)
    assert at_once.count(True) >= 8, at_once


def test_no_request_fails_while_a_model_is_loaded_again(stack: Stack, client: Any) -> None:
    one = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 1]}
    bodies: list[tuple[bytes, dict[str, str]]] = [(json.dumps({"inputs": [one]}).encode(), {})]
    with constant_load(stack.port, "/v2/models/scale/infer", bodies, callers=16) as load:
        for rows in (4, 6, 3):
            load.more(20)
            client.load_model("scale", config=json.dumps({"max_batch_size": rows}))
        client.load_model("scale")
        load.more(50)
    assert {answer.status for answer in load.answers} == {200}
    assert {tuple(json.loads(answer.body)["outputs"][0]["data"]) for answer in load.answers} == {(3.0, 3.0)}


def test_what_survives_a_restart(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    for name in ("stays", "sleeps", "goes", "changes"):
        times(repository / name / "1" / "model.onnx", 2)
    settings = {"triton_repositories": f"{repository},{tmp_path / 'more'}", "open_control": True}
    times(tmp_path / "more" / "other" / "1" / "model.onnx", 3)
    with running_stack(tmp_path, settings=settings) as stack, connected(stack) as client:
        assert scaled(client, "other") == 3
        client.unload_model("sleeps")
        stack.push("sent", times(tmp_path / "sent.onnx", 4))
        client.unload_model("sent")
        kept = stack.home / "repository" / "models" / "stays" / "1" / "manifest.json"
        before = kept.read_bytes()
    times(repository / "changes" / "1" / "model.onnx", 5)
    (repository / "goes").rename(tmp_path / "gone")
    with (
        running_stack(tmp_path, settings={"triton_repositories": repository, "open_control": True}) as stack,
        connected(stack) as client,
    ):
        wanted = {"stays": "READY", "changes": "READY", "sleeps": "UNAVAILABLE", "sent": "UNAVAILABLE"}
        wait_until(lambda: {name: state for (name, _), (state, _) in index(client).items()} == wanted)
        assert (scaled(client, "stays"), scaled(client, "changes")) == (2, 5)
        assert kept.read_bytes() == before
        assert "sleeps stays unloaded" in "\n".join(stack.lines)
        client.load_model("sleeps")
        client.load_model("sent")
        assert (scaled(client, "sleeps"), scaled(client, "sent")) == (2, 4)
