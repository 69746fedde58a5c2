"""Whose a model is and what a key may keep: owners, labels and quotas, with two gateways and real uploads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http

from millstream import Client
from millstream.services.errors import Failure
from tests.kit import models
from tests.kit.command_line import Millstream
from tests.kit.stack import CALL_S_MAX, Stack, assert_quiet, running_stack

ADMIN = "the-admin-key-of-this-test"
Key = dict[str, Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("owners")
    with running_stack(folder, gateways=2, settings={"admin_key": ADMIN}) as stack:
        models.scale(folder / "scale.onnx", 2.0, 4)
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    yield served
    assert_quiet(served)


@pytest.fixture
def file(served: Stack) -> Path:
    return served.home.parent / "scale.onnx"


def create(stack: Stack, name: str, *scopes: str, **limits: Any) -> Key:
    asked = {"name": name, "scopes": [*scopes] or [f"models:write:{name}-*", f"infer:{name}-*"], "limits": limits}
    reply = stack.http.post("/admin/v1/keys", json=asked)
    assert reply.status_code == 201, reply.text
    return dict(reply.json())


def client_of(stack: Stack, key: Key) -> Client:
    return Client(stack.url, key=key["key"], retries=0)


def test_a_model_has_the_owner_that_uploaded_its_first_version(stack: Stack, file: Path) -> None:
    first, second = create(stack, "red"), create(stack, "crimson", "models:write:red-*", "models:read")
    with client_of(stack, first) as red, client_of(stack, second) as crimson:
        red.push("red-a", file)
        red.push("red-staged", file, activate=False)
        crimson.push("red-a", file)
        stack.push("green", file)  # with the admin key
        assert [red.model(name)["owner"] for name in ("red-a", "red-staged")] == ["red", "red"]
        assert crimson.model("green")["owner"] == ""
        assert [one["name"] for one in crimson.models(owner="red")] == ["red-a", "red-staged"]
        assert "green" in [one["name"] for one in crimson.models(owner="")]
        assert crimson.models(owner="crimson") == []
        for key in (red, crimson):
            with pytest.raises(Failure, match="lacks the scope 'admin"):
                key.configure("red-a", owner="crimson")
    with Client(stack.url, key=ADMIN) as admin:
        assert admin.configure("red-a", owner="crimson")["settings"]["owner"] == "crimson"
        assert [one["name"] for one in admin.models(owner="crimson")] == ["red-a"]
        admin.activate("red-a", 1)  # what else changes of an endpoint keeps its owner
        admin.remove("red-a", 2)
        assert admin.model("red-a")["owner"] == "crimson"


def test_a_load_with_files_makes_a_model_with_an_owner(stack: Stack, file: Path) -> None:
    key = create(stack, "loader")
    headers = {"Authorization": f"Bearer {key['key']}"}
    config = '{"backend": "onnxruntime"}'
    with triton_http.InferenceServerClient(stack.url.removeprefix("http://"), network_timeout=CALL_S_MAX) as triton:
        triton.load_model("loader-m", headers, config=config, files={"file:1/model.onnx": file.read_bytes()})
    with client_of(stack, key) as loader:
        assert loader.model("loader-m")["owner"] == "loader"
        assert loader.predict("loader-m", np.ones((1, 4), np.float32))["y"].tolist() == [[2.0] * 4]


def test_labels_are_changed_one_by_one_and_select_models(stack: Stack, file: Path) -> None:
    cli = Millstream(stack.named_home, create(stack, "blue")["key"])
    for name in ("blue-a", "blue-b"):
        cli.ok("push", name, str(file))
    cli.ok("configure", "blue-a", "--label", "stage=prod", "--label", "team=x", "--instances-min", "1")
    cli.ok("configure", "blue-b", "--label", "stage=test")
    settings = cli.json("configure", "blue-a", "--label", "team=", "--label", "mail=a@b.example")["settings"]
    assert settings["labels"] == {"stage": "prod", "mail": "a@b.example"}
    assert (settings["owner"], settings["instances_min"]) == ("blue", 1)
    chosen = cli.json("models", "--owner", "blue", "--label", "stage=prod", "--label", "mail=a@b.example")
    assert [(one["name"], one["labels"]) for one in chosen] == [("blue-a", settings["labels"])]
    assert cli.json("models", "--label", "stage=prod", "--label", "mail=other") == []
    assert "no such models" in cli.ok("models", "--label", "stage=none")
    for shown in (cli.ok("models"), cli.ok("describe", "blue-a"), cli.ok("configure", "blue-a")):
        assert "blue" in shown
        assert "mail=a@b.example, stage=prod" in shown
    assert "write NAME=VALUE" in cli.fails("models", "--label", "stage", code=2)
    assert stack.http.get("/admin/v1/models", params={"label": "stage"}).status_code == 400


@pytest.mark.parametrize(
    "labels",
    [
        *({"a": "x" * 64}, {"": "x"}, {"a": ""}, {"a b": "x"}, {"a": "x\n"}, {"ä": "x"}, {"a": 1}, {"a=b": "x"}),
        *(["a"], "a=b", 1, {f"label-{number}": "x" for number in range(17)}),
    ],
    ids=str,
)
def test_wrong_labels_are_refused_in_one_line_and_change_nothing(stack: Stack, file: Path, labels: Any) -> None:
    if "labelled" not in {one["name"] for one in stack.http.get("/admin/v1/models").json()["models"]}:
        stack.push("labelled", file)
    before = stack.http.get("/admin/v1/models/labelled/settings").json()
    reply = stack.http.patch("/admin/v1/models/labelled", json={"labels": labels})
    assert reply.status_code == 400
    assert "labels" in reply.json()["error"]
    assert "\n" not in reply.json()["error"]
    assert stack.http.get("/admin/v1/models/labelled/settings").json() == before
