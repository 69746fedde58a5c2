"""Whose a model is and what a key may keep: owners, labels and quotas, with two gateways and real uploads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from select import select
from typing import Any

import httpx2
import numpy as np
import pytest
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from millstream import Client, ServerError
from millstream.services.errors import Failure
from tests.kit import models
from tests.kit.command_line import Millstream
from tests.kit.stack import CALL_S_MAX, Stack, assert_quiet, running_stack
from tests.kit.wait import wait_until

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
        crimson.push("red-a", file, version=2)
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
        for wrong in ("a b", "x" * 65, "-", "a\n"):
            with pytest.raises(Failure, match="owner"):
                admin.configure("red-a", owner=wrong)


def test_a_load_with_files_makes_a_model_with_an_owner(stack: Stack, file: Path) -> None:
    key = create(stack, "loader")
    stored = (stack.home / "repository" / "keys" / f"{key['id']}.json").read_text()
    assert "null" not in stored  # an earlier release refuses a key with limits that it does not know
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


def refused(key: Client, name: str, file: Path, status: int, message: str) -> ServerError:
    with pytest.raises(ServerError, match=message) as error:
        key.push(name, file)
    assert error.value.status == status
    assert "\n" not in error.value.message
    return error.value


def test_a_key_owns_so_many_models(stack: Stack, file: Path) -> None:
    cli = Millstream(stack.named_home, ADMIN)
    made = cli.json("keys", "create", "few", "--scope", "models:write:few-*", "--models", "2")
    assert "models 2" in cli.ok("keys", "list")
    with client_of(stack, made) as few:
        for name in ("few-a", "few-b", "few-b"):  # a version of its own model is no further model
            few.push(name, file)
        refused(few, "few-c", file, 403, "key 'few' has 2 models, and its limit is 2: delete one")
        with triton_http.InferenceServerClient(stack.url.removeprefix("http://"), network_timeout=CALL_S_MAX) as triton:
            headers, files = {"Authorization": f"Bearer {made['key']}"}, {"file:1/model.onnx": file.read_bytes()}
            with pytest.raises(InferenceServerException, match="its limit is 2"):
                triton.load_model("few-c", headers, config='{"backend": "onnxruntime"}', files=files)
        few.remove("few-a")
        few.push("few-c", file)
        cli.ok("keys", "edit", "few", "--models", "3")
        few.push("few-a", file)
        cli.ok("keys", "edit", "few", "--models", "0")
        few.push("few-d", file)


def test_the_models_of_a_key_take_so_much_of_the_disk(stack: Stack, file: Path) -> None:
    cli = Millstream(stack.named_home, ADMIN)
    made = cli.json("keys", "create", "small", "--scope", "models:write:small-*", "--disk", "40KiB")
    assert made["limits"]["disk_bytes"] == 40 << 10
    assert "disk_bytes 40.0 KiB" in cli.ok("keys", "list")
    other = create(stack, "other", "models:write:small-*")
    large = models.weighty(file.with_name("large.onnx"), 40 << 10)
    known = r"the models of key 'small' would take \d+ bytes of the disk, and its limit is 40960 bytes: delete versions"
    with client_of(stack, made) as small, client_of(stack, other) as others:
        small.push("small-a", file)
        for key in (small, others):  # it counts for the owner of the model, whoever uploads
            refused(key, "small-a", large, 403, known)
        pieces = iter([large.read_bytes()])  # chunked: its size is known when it has been received
        sent = stack.http.post(
            "/admin/v1/models/small-b/versions", content=pieces, headers={"Authorization": f"Bearer {made['key']}"}
        )
        assert (sent.status_code, re.search(known, sent.json()["error"]) is not None) == (403, True), sent.text
        assert [one["name"] for one in small.models(owner="small")] == ["small-a"]
        others.push("small-of-others", large)
        cli.ok("keys", "edit", "small", "--disk", "1MiB")
        small.push("small-b", large)
    assert "write a size" in cli.fails("keys", "edit", "small", "--disk", "much", code=2)


def test_a_key_sends_so_many_uploads_at_once(stack: Stack, file: Path) -> None:
    made = create(stack, "calm", uploads=1)
    headers = {"Authorization": f"Bearer {made['key']}"}
    content = file.read_bytes()

    def empty(gateway: httpx2.Client) -> httpx2.Response:
        return gateway.post("/admin/v1/models/calm-b/versions", headers=headers)

    def await_status(gateway: httpx2.Client, status: int) -> None:
        wait_until(lambda: empty(gateway).status_code == status, what=f"an upload is answered {status}")

    def begin() -> HTTPConnection:
        """Send the head and some bytes of an upload, to either gateway."""
        connection = HTTPConnection(stack.url.removeprefix("http://"), timeout=CALL_S_MAX)
        connection.putrequest("POST", "/admin/v1/models/calm-a/versions?wait=60")
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            connection.putheader(name, value)
        connection.endheaders(content[:50])
        return connection

    with stack.gateway(0) as first, stack.gateway(1) as second:
        with closing(begin()):  # an upload that its client gives up is in flight no more
            pass
        for gateway in (first, second):
            await_status(gateway, 400)  # it has no bytes
        slow = begin()

        def is_counted(gateway: httpx2.Client) -> bool:
            """Whether `gateway` knows of the slow upload, which is sent again if its own gateway had old news."""
            nonlocal slow
            if select([slow.sock], [], [], 0)[0]:
                assert slow.getresponse().status == 429
                slow.close()
                slow = begin()
            return empty(gateway).status_code == 429

        for gateway in (first, second):  # the other one is told within some tenths of a second
            wait_until(partial(is_counted, gateway), what="an upload is answered 429")
            reply = empty(gateway)
            assert reply.json()["error"] == "key 'calm' has reached its limit of 1 uploads at once: try again in 5 s"
            assert reply.headers["retry-after"] == "5"
        stack.push("calm-of-others", file)
        slow.send(content[50:])
        assert slow.getresponse().status == 201
        slow.close()
        for gateway in (first, second):
            await_status(gateway, 400)


def test_uploads_at_once_exceed_a_quota_by_themselves_at_most(stack: Stack, file: Path) -> None:
    key = create(stack, "burst", models=1, uploads=3)
    with client_of(stack, key) as burst, ThreadPoolExecutor(8) as threads:

        def push(number: int) -> int:
            try:
                burst.push(f"burst-{number}", file)
            except ServerError as error:
                return int(error.status)
            return 201

        statuses = Counter(threads.map(push, range(16)))
        assert 1 <= statuses[201] <= 3 * 2, statuses  # two gateways hear of each other's uploads a moment later
        assert set(statuses) <= {201, 403, 429}
        wait_until(lambda: push(16) == 403, what="both gateways have heard that no upload is in flight")
        refused(burst, "burst-late", file, 403, "its limit is 1: delete one")
