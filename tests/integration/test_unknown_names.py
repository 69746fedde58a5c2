"""A model or version that does not exist: each protocol's refusal proposes the nearest names, or the versions."""

from __future__ import annotations

import json
from collections.abc import Iterator

import grpc
import pytest
import tritonclient.grpc as tc_grpc
from tritonclient.utils import InferenceServerException

from tests.kit import models
from tests.kit.stack import Stack, running_stack

MEANT = "did you mean 'shop-ranker'?"
VERSIONS = "it has versions 2 and 1"


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("ranking")
    with running_stack(folder, settings={"admin_key": "secret"}) as stack:
        path = models.mlp(folder / "mlp.onnx")
        stack.push("shop-ranker", path, version=1)
        stack.push("shop-ranker", path, version=2)
        stack.push("hidden", path)
        stack.http.post("/v2/repository/models/hidden/unload").raise_for_status()
        yield stack


NEAR = "shop_rankr"
CALLS = [
    ("POST", f"/v2/models/{NEAR}/infer", MEANT),
    ("GET", f"/v2/models/{NEAR}", MEANT),
    ("GET", f"/v2/models/{NEAR}/ready", MEANT),
    ("GET", f"/v2/models/{NEAR}/config", MEANT),
    ("GET", f"/v2/models/{NEAR}/stats", MEANT),
    ("GET", f"/v2/models/{NEAR}/trace/setting", MEANT),
    ("POST", f"/v2/models/{NEAR}/generate", MEANT),
    ("POST", f"/v2/repository/models/{NEAR}/load", MEANT),
    ("POST", f"/v1/models/{NEAR}:predict", MEANT),
    ("GET", f"/v1/models/{NEAR}", MEANT),
    ("POST", f"/predictions/{NEAR}", MEANT),
    ("GET", f"/models/{NEAR}", MEANT),
    ("POST", f"/endpoints/{NEAR}/invocations", MEANT),
    ("GET", f"/admin/v1/models/{NEAR}", MEANT),
    ("DELETE", f"/admin/v1/models/{NEAR}", MEANT),
    ("DELETE", f"/admin/v1/models/{NEAR}/versions/1", MEANT),
    ("POST", f"/admin/v1/models/{NEAR}/versions/1/activate", MEANT),
    ("POST", "/v2/models/shop-ranker/versions/9/infer", VERSIONS),
    ("GET", "/v2/models/shop-ranker/versions/9", VERSIONS),
    ("POST", "/v1/models/shop-ranker/versions/9:predict", VERSIONS),
    ("POST", "/predictions/shop-ranker/9.0", VERSIONS),
    ("GET", "/admin/v1/models/shop-ranker/versions/9", VERSIONS),
    ("DELETE", "/admin/v1/models/shop-ranker/versions/9", VERSIONS),
    ("POST", "/admin/v1/models/shop-ranker/versions/9/activate", VERSIONS),
]


@pytest.mark.parametrize(("method", "path", "says"), CALLS)
def test_the_refusal_says_what_was_meant(ranking: Stack, method: str, path: str, says: str) -> None:
    body = b"{}" if method == "POST" else None
    reply = ranking.http.request(method, path, content=body, headers={"Content-Type": "application/json"})
    assert 400 <= reply.status_code < 500
    assert says in message_of(reply.json())


def message_of(document: dict[str, object]) -> str:
    """Return the message of an error in any protocol's form."""
    error = document.get("error") or document.get("message") or document.get("Message")
    return str(error["message"]) if isinstance(error, dict) else str(error)


def test_embeddings_say_what_was_meant(ranking: Stack) -> None:
    reply = ranking.http.post("/v1/embeddings", json={"model": NEAR, "input": "a"})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "model_not_found")
    assert MEANT in error["message"]


def test_grpc_says_what_was_meant(ranking: Stack) -> None:
    with tc_grpc.InferenceServerClient(ranking.grpc) as client:
        for name, version, says in ((NEAR, "", MEANT), ("shop-ranker", "9", VERSIONS)):
            with pytest.raises(InferenceServerException) as caught:
                client.get_model_metadata(name, version)
            assert caught.value.status() == str(grpc.StatusCode.NOT_FOUND)
            assert says in caught.value.message()


def test_no_name_is_told_that_callers_without_a_key_cannot_list(ranking: Stack) -> None:
    listed = ranking.http.get("/v2/models", headers={"Authorization": ""}).json()["models"]
    reply = ranking.http.post("/v2/models/hiden/infer", json={}, headers={"Authorization": ""})
    assert "hidden" not in listed
    assert reply.status_code == 404
    assert "hidden" not in json.dumps(reply.json())


def test_an_unloaded_model_says_so(ranking: Stack) -> None:
    assert "is unloaded" in ranking.http.post("/v2/models/hidden/infer", json={}).json()["error"]
