"""The OpenAPI document is valid, complete, and the one that is committed."""

from __future__ import annotations

import copy
import json
import keyword
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis

from millstream.gateway.app import api_document
from millstream.gateway.http.openapi import EXAMPLE_FORM
from millstream.gateway.http.openapi_document import operations
from tests.kit import openapi
from tests.kit.application import Application

DOCUMENT = openapi.current()
DIGIT = Path(__file__).parents[2] / "examples" / "digits" / "request.json"


@pytest.mark.plugins
def test_the_committed_document_is_the_current_one() -> None:
    committed = json.loads(openapi.PATH.read_text(encoding="utf-8"))
    found = openapi.differences(committed, DOCUMENT)
    assert not found, "\n".join(
        ["docs/openapi.json is not what the code makes. If you meant it: make openapi", "", *found]
    )
    assert list(committed["paths"]) == list(DOCUMENT["paths"]), "the order changed: make openapi"


def test_it_is_valid() -> None:
    check(DOCUMENT)


def check(document: dict[str, Any]) -> None:
    """Check a document by OpenAPI's own schema, and what that schema cannot say."""
    schemathesis.openapi.from_dict(document).validate()
    for reference in references(document):
        found: Any = document
        for name in reference.removeprefix("#/").split("/"):
            found = found[name.replace("~1", "/").replace("~0", "~")]
    for path, _, operation in operations(document):
        declared = {one["name"] for one in operation.get("parameters", []) if one["in"] == "path"}
        assert declared == set(re.findall(r"{(\w+)}", path)), path


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from references(item)


@pytest.mark.plugins
@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: document.pop("info"),
        lambda document: document["components"]["securitySchemes"].update({"a key": {"type": "http"}}),
        lambda document: document["components"]["schemas"].pop("InferReply"),
        lambda document: document["paths"]["/ping"]["get"]["responses"]["200"].pop("description"),
    ],
)
def test_what_is_not_valid_is_found(spoil: Callable[[Any], object]) -> None:
    spoiled = copy.deepcopy(DOCUMENT)
    spoil(spoiled)
    with pytest.raises((KeyError, schemathesis.errors.SchemathesisError, ValueError)):
        check(spoiled)


def test_it_is_made_the_same_way_twice() -> None:
    assert json.dumps(api_document("1.0")) == json.dumps(api_document("1.0"))


@pytest.mark.plugins
def test_operation_ids_are_names_of_functions() -> None:
    names = [operation["operationId"] for _, _, operation in operations(DOCUMENT)]
    assert len(names) == len(set(names))
    assert [name for name in names if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name)] == []
    assert {"infer", "infer_version", "list_models", "upload_version", "v1_predict", "create_embeddings"} <= set(names)


def test_every_success_with_a_body_has_a_schema() -> None:
    without = [
        f"{operation['operationId']} {status} {kind}"
        for _, _, operation in operations(DOCUMENT)
        for status, response in operation["responses"].items()
        if status.startswith("2")
        for kind, body in response.get("content", {}).items()
        if not body.get("schema")
    ]
    assert without == []


def test_successes_without_a_body_are_those_that_have_none() -> None:
    empty = {
        operation["operationId"]
        for _, _, operation in operations(DOCUMENT)
        for status, response in operation["responses"].items()
        if status.startswith("2") and not response.get("content")
    }
    assert {name for name in empty if "shared_memory" not in name} == {"delete_model", "delete_version"}


def test_every_error_names_the_error_of_its_protocol() -> None:
    prefixes = {"/endpoints/": "SageMakerError", "/v1/embeddings": "OpenAIError", "/predictions/": "TorchServeError"}
    for path, _, operation in operations(DOCUMENT):
        wanted = next((name for prefix, name in prefixes.items() if path.startswith(prefix)), None)
        for status, response in operation["responses"].items():
            if not status.startswith("2") and wanted is not None:
                assert response == {"$ref": f"#/components/responses/{wanted}{status}"}
    for name, response in DOCUMENT["components"]["responses"].items():
        schema = response["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert name == f"{schema}{name[-3:]}"
        headers = response.get("headers", {})
        assert ("Retry-After" in headers) == (name[-3:] in {"429", "503"})
        assert ("WWW-Authenticate" in headers) == (name[-3:] == "401")


def test_every_reply_has_its_id() -> None:
    for _, _, operation in operations(DOCUMENT):
        for response in operation["responses"].values():
            found = (
                DOCUMENT["components"]["responses"][response["$ref"].rpartition("/")[2]]
                if "$ref" in response
                else response
            )
            assert "X-Request-Id" in found["headers"]


def test_who_wrote_it_under_which_licence_and_where_it_is() -> None:
    assert DOCUMENT["info"]["license"]["identifier"] == "Apache-2.0"
    assert DOCUMENT["info"]["contact"]["name"]
    assert [server["url"] for server in DOCUMENT["servers"]] == ["/"]
    assert DOCUMENT["components"]["securitySchemes"].keys() == {"key"}


@pytest.mark.plugins
def test_rare_sections_are_folded_and_last() -> None:
    tags = DOCUMENT["tags"]
    assert all(tag["description"] for tag in tags)
    is_open = [tag["x-open"] for tag in tags]
    assert is_open == sorted(is_open, reverse=True)
    assert tags[0]["name"] == "v2 inference"
    assert {tag["name"] for tag in tags[-3:]} == {"v2 extensions", "v2 shared memory", "v2 model repository"}
    used = {tag for _, _, operation in operations(DOCUMENT) for tag in operation["tags"]}
    assert used == {tag["name"] for tag in tags}


def test_the_example_is_the_digits_example() -> None:
    body = DOCUMENT["paths"]["/v2/models/{model}/infer"]["post"]["requestBody"]["content"]["application/json"]
    assert body["example"] == json.loads(DIGIT.read_text())
    assert EXAMPLE_FORM not in json.dumps(DOCUMENT)


def _secured(document: dict[str, Any]) -> set[str]:
    return {path for path, _, operation in operations(document) if operation.get("security")}


@pytest.mark.plugins
@pytest.mark.anyio
async def test_keys_are_described_as_they_are_in_force(tmp_path: Path) -> None:
    async with Application(tmp_path, sagemaker_multi_model=True).client() as client:
        document = (await client.get("/openapi.json")).json()
    assert "/admin/v1/models" in _secured(document)
    assert not {path for path in _secured(document) if path.startswith("/models")}
    assert {path for path in _secured(DOCUMENT) if path.startswith("/models")}
    check(document)


@pytest.mark.plugins
def test_a_difference_names_the_operation_and_shows_its_lines() -> None:
    changed = copy.deepcopy(DOCUMENT)
    changed["paths"]["/metrics"]["get"]["summary"] = "Other words"
    del changed["paths"]["/ping"]
    changed["components"]["schemas"]["New"] = {"type": "string"}
    found = openapi.differences(DOCUMENT, changed)
    assert found[:2] == ["removed: GET /ping", "added: schemas.New"]
    assert found[2].startswith("changed: GET /metrics\n")
    assert '+ "summary": "Other words",' in found[2]
    assert len(found) == 3


def test_the_pretty_form_is_the_same_document() -> None:
    text = openapi.pretty(DOCUMENT)
    assert json.loads(text) == DOCUMENT
    assert openapi.pretty([]) == "[]"
    assert openapi.pretty({"a": list(range(100))}).count("\n") < 10
