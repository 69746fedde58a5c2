"""Ensembles in a Triton repository: loaded with their models, called by Triton's client, reloaded and unloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.kit import models
from tests.kit.stack import Stack, running_stack

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [{ name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "HALF" data_type: TYPE_FP32 dims: [ 4 ] }]
ensemble_scheduling {
  step [
    { model_name: "double" model_version: -1
      input_map { key: "x" value: "IN" } output_map { key: "y" value: "HALF" } },
    { model_name: "%s" model_version: -1
      input_map { key: "x" value: "HALF" } output_map { key: "y" value: "OUT" } }
  ]
}
"""
X = np.arange(8, dtype=np.float32).reshape(2, 4)


def write(repository: Path, name: str, factor: float) -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True, exist_ok=True)
    models.scale(folder / "model.onnx", factor, 4)
    (repository / name / "config.pbtxt").write_text("max_batch_size: 8\n")


def write_ensemble(repository: Path, name: str, second: str) -> None:
    (repository / name / "1").mkdir(parents=True, exist_ok=True)
    (repository / name / "config.pbtxt").write_text(ENSEMBLE % second)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    write_ensemble(folder, "an_ensemble", "triple")  # listed before its models
    write(folder, "double", 2.0)
    write(folder, "triple", 3.0)
    write_ensemble(folder, "broken", "nothing")
    return folder


@pytest.fixture(scope="module")
def stack(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"triton_repositories": repository, "open_control": True}
    with running_stack(tmp_path_factory.mktemp("stack"), settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Any]:
    with triton_http.InferenceServerClient(stack.url.removeprefix("http://"), network_timeout=120) as found:
        yield found


def infer(client: Any, name: str, *outputs: str) -> Any:
    tensor = triton_http.InferInput("IN", list(X.shape), "FP32")
    tensor.set_data_from_numpy(X)
    return client.infer(name, [tensor], outputs=[triton_http.InferRequestedOutput(one) for one in outputs] or None)


def success(client: Any, name: str) -> int:
    found: int = client.get_inference_statistics(name)["model_stats"][0]["inference_stats"]["success"]["count"]
    return found


def test_an_ensemble_is_served_in_place_with_its_models(stack: Stack, client: Any) -> None:
    found = infer(client, "an_ensemble")
    assert np.array_equal(found.as_numpy("OUT"), 6 * X)
    assert np.array_equal(found.as_numpy("HALF"), 2 * X)
    metadata = client.get_model_metadata("an_ensemble")
    assert (metadata["platform"], [one["name"] for one in metadata["inputs"]]) == ("ensemble", ["IN"])
    config = client.get_model_config("an_ensemble")
    assert (config["platform"], config["max_batch_size"], "instance_group" in config) == ("ensemble", 8, True)
    assert config["instance_group"] == []
    assert [step["model_name"] for step in config["ensemble_scheduling"]["step"]] == ["double", "triple"]
    index = {one["name"]: one for one in client.get_model_repository_index()}
    assert index["an_ensemble"]["state"] == "READY"
    assert "models that are not available or ambiguous: nothing" in index["broken"]["reason"]


def test_only_the_steps_that_an_output_needs_run(stack: Stack, client: Any) -> None:
    before = success(client, "triple"), success(client, "double")
    assert np.array_equal(infer(client, "an_ensemble", "HALF").as_numpy("HALF"), 2 * X)
    assert (success(client, "triple"), success(client, "double")) == (before[0], before[1] + 1)


def test_more_rows_than_the_ensemble_allows_are_refused(client: Any) -> None:
    tensor = triton_http.InferInput("IN", [9, 4], "FP32")
    tensor.set_data_from_numpy(np.zeros((9, 4), np.float32))
    with pytest.raises(InferenceServerException) as caught:
        client.infer("an_ensemble", [tensor])
    assert "batch-size must be <= 8 for 'an_ensemble'" in str(caught.value)


def test_an_ensemble_follows_a_model_that_is_loaded_again(client: Any, repository: Path) -> None:
    write(repository, "triple", 5.0)
    client.load_model("triple")
    assert np.array_equal(infer(client, "an_ensemble").as_numpy("OUT"), 10 * X)
    write(repository, "triple", 3.0)
    client.load_model("triple")
    assert np.array_equal(infer(client, "an_ensemble").as_numpy("OUT"), 6 * X)


def test_a_load_loads_the_models_of_the_steps_and_an_unload_may_unload_them(client: Any, repository: Path) -> None:
    write(repository, "late", 7.0)
    write_ensemble(repository, "later", "late")
    client.load_model("later")
    assert np.array_equal(infer(client, "later").as_numpy("OUT"), 14 * X)
    client.unload_model("later")
    assert client.is_model_ready("late")
    client.load_model("later")
    client.unload_model("later", unload_dependents=True)
    assert not client.is_model_ready("late")
    assert client.is_model_ready("double"), "another ensemble runs it"


def test_ensembles_in_a_circle_are_refused(client: Any, repository: Path) -> None:
    write_ensemble(repository, "circle", "around")
    write_ensemble(repository, "around", "circle")
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("circle")
    assert "circular dependency between ensembles: circle -> ... -> around -> circle" in str(caught.value)
    assert np.array_equal(infer(client, "an_ensemble").as_numpy("OUT"), 6 * X)


def test_a_configuration_of_an_ensemble_can_be_pushed(stack: Stack, client: Any) -> None:
    reply = stack.http.post(
        "/admin/v1/models/pushed/versions", params={"wait": 30}, content=(ENSEMBLE % "triple").encode()
    )
    assert reply.status_code == 201, reply.text
    assert np.array_equal(infer(client, "pushed").as_numpy("OUT"), 6 * X)
