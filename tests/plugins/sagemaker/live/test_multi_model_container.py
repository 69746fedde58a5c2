"""SageMaker's contract of multi-model containers, in a worker with memory for one model of two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.kit import models
from tests.kit.sagemaker import runtime_client
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

MIB = 1 << 20
MODEL_BYTES = 60 * MIB  # a load takes twice that, and 4.5 times are predicted until one was measured
MEMORY = "280MiB"  # of which the interpreter takes 110 MiB: no model is loaded beside another one
ROW = [[1.0] * 1024]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("container")
    imports = folder / "models"
    for name, size_bytes in (
        ("one", MODEL_BYTES),
        ("two", MODEL_BYTES + MIB),
        ("large", MODEL_BYTES + 2 * MIB),
        ("tiny", MIB),
    ):
        path = imports / name / "model"
        path.mkdir(parents=True)
        models.heavy(path / "model.onnx", size_bytes)
    settings = {"sagemaker_multi_model": True, "import_dir": imports, "worker_memory": MEMORY}
    with running_stack(folder, settings=settings) as started:
        yield started


def url_of(stack: Stack, name: str) -> str:
    return str(stack.home.parent / "models" / name / "model")


def load(stack: Stack, name: str) -> Any:
    return stack.http.post("/models", json={"model_name": name, "url": url_of(stack, name)})


def is_loaded(stack: Stack, name: str) -> bool:
    return load(stack, name).status_code in {200, 409}


def names(stack: Stack) -> list[str]:
    return [one["modelName"] for one in stack.http.get("/models").json()["models"]]


def held(stack: Stack) -> set[str]:
    placed = stack.http.get("/admin/v1/placement").json()
    return {one["model"] for worker in placed["workers"] for one in worker["instances"] if one["state"] == "ready"}


def answer(stack: Stack, name: str) -> Any:
    return stack.http.post(f"/models/{name}/invoke", json=ROW)


def test_models_take_turns_in_the_memory(stack: Stack) -> None:
    assert load(stack, "one").status_code == 200
    assert load(stack, "one").status_code == 409
    assert held(stack) == {"one"}
    described = {"modelName": "one", "modelUrl": url_of(stack, "one")}
    assert stack.http.get("/models").json() == {"models": [described]}
    assert stack.http.get("/models/one").json() == described

    # Pinned, it stays: the other one finds no memory, and is not registered.
    assert stack.http.patch("/admin/v1/models/one", json={"pin": True}).status_code == 200
    refused = load(stack, "two")
    assert refused.status_code == 507, refused.text
    assert names(stack) == ["one"]

    assert stack.http.patch("/admin/v1/models/one", json={"pin": False}).status_code == 200
    wait_until(partial(is_loaded, stack, "two"), what="there is memory for it")
    assert "two" in held(stack)
    assert sorted(names(stack)) == ["one", "two"]

    # A call loads it again, if it was unloaded.
    wait_until(lambda: answer(stack, "one").status_code == 200, what="it answers")
    wait_until(lambda: "one" in held(stack), what="the gateway knows the worker that answered")
    assert stack.http.delete("/models/two").status_code == 200
    assert stack.http.delete("/models/one").status_code == 200
    wait_until(lambda: held(stack) == set(), what="the worker has unloaded both")
    assert answer(stack, "one").status_code == 404


def test_a_model_that_was_never_loaded_finds_room_beside_a_pinned_one(stack: Stack) -> None:
    """What is predicted for it takes all memory for models, of which the pinned one has a part."""
    assert load(stack, "tiny").status_code == 200
    assert stack.http.patch("/admin/v1/models/tiny", json={"pin": True}).status_code == 200
    wait_until(partial(is_loaded, stack, "large"), what="it is loaded")
    assert {"tiny", "large"} <= held(stack)
    for name in ("tiny", "large"):
        assert stack.http.delete(f"/models/{name}").status_code == 200


def test_a_call_names_its_target_model(stack: Stack) -> None:
    for name in ("one", "two"):
        wait_until(partial(is_loaded, stack, name), what=f"{name} is loaded")
    runtime = runtime_client(stack)
    body = json.dumps({"instances": ROW}).encode()

    def answers(name: str) -> bool:
        try:
            reply = runtime.invoke_endpoint(
                EndpointName="any", TargetModel=name, ContentType="application/json", Body=body
            )
        except ClientError as error:
            assert error.response["Error"]["Code"] in {"ModelNotReadyException", "ServiceUnavailable"}
            return False
        return b"predictions" in reply["Body"].read()

    for name in ("one", "two", "one"):
        wait_until(partial(answers, name), what=f"{name} is loaded by calls")
