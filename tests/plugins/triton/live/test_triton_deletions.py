"""Models of Triton's repository API that are deleted, or whose folders vanish, while they are loaded or before."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.kit import models
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.wait import wait_until


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repository")


@pytest.fixture(scope="module")
def stack(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"triton_repositories": repository, "open_control": True}
    with running_stack(tmp_path_factory.mktemp("stack"), settings=settings) as stack:
        yield stack


def write(repository: Path, name: str, factor: float) -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True, exist_ok=True)
    models.scale(folder / "model.onnx", factor)


def load(stack: Stack, name: str, config: str | None = None) -> httpx2.Response:
    body = {"parameters": {"config": config}} if config else {}
    return stack.http.post(f"/v2/repository/models/{name}/load", json=body, timeout=120)


def answer(stack: Stack, name: str) -> float:
    one = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 1]}
    reply = stack.http.post(f"/v2/models/{name}/infer", json={"inputs": [one]}).raise_for_status()
    return float(reply.json()["outputs"][0]["data"][0])


@contextmanager
def loading(stack: Stack, name: str, config: str | None = None) -> Iterator[Future[httpx2.Response]]:
    """Begin a load that does not end before the block does: its worker is stopped."""
    with ThreadPoolExecutor(1) as threads, sigstopped(stack.pids()["cpu-0"]):
        begun = threads.submit(load, stack, name, config)
        folder = stack.home / "repository" / "models" / name
        wait_until(lambda: list(folder.glob("*/staged.json")), what="it is staged")
        yield begun


def test_a_load_whose_model_is_deleted_ends(stack: Stack, repository: Path) -> None:
    write(repository, "deleted", 2)
    assert load(stack, "deleted").json()["versions"] == ["1"]
    with loading(stack, "deleted", '{"max_batch_size": 4}') as begun:
        assert stack.http.delete("/admin/v1/models/deleted").status_code == 204
    reply = begun.result(60)
    assert (reply.status_code, reply.json()["error"]) == (
        400,
        "failed to load 'deleted', version 1 was deleted meanwhile",
    )
    assert stack.http.get("/admin/v1/models/deleted").status_code == 404  # not listed with this as its failure
    assert load(stack, "deleted").status_code == 200  # its folder is there: the next load begins anew
    assert answer(stack, "deleted") == 2


def test_a_version_that_is_deleted_during_a_load_stays_deleted(stack: Stack, tmp_path: Path) -> None:
    for factor in (2, 3):
        stack.push("shrunk", models.scale(tmp_path / "model.onnx", factor))
    assert stack.http.post("/v2/repository/models/shrunk/unload").status_code == 200
    with loading(stack, "shrunk", "{}") as begun:
        deleted = stack.http.delete("/admin/v1/models/shrunk/versions/1", params={"force": "true"})
        assert deleted.status_code == 204
    reply = begun.result(60)
    assert (reply.status_code, "version 1 was deleted meanwhile" in reply.json()["error"]) == (400, True)
    assert load(stack, "shrunk").json()["versions"] == ["2"]
    assert [one["version"] for one in stack.http.get("/admin/v1/models/shrunk").json()["versions"]] == [2]
    assert answer(stack, "shrunk") == 3


def test_a_model_whose_folder_is_away_serves_on_and_comes_back(stack: Stack, repository: Path, tmp_path: Path) -> None:
    write(repository, "mounted", 4)
    assert load(stack, "mounted").status_code == 200
    (repository / "mounted").rename(tmp_path / "away")
    reply = load(stack, "mounted")
    assert reply.status_code == 400
    assert f"{repository / 'mounted'} is no folder of a served repository now" in reply.json()["error"]
    content = base64.b64encode(models.scale(tmp_path / "sent.onnx", 5).read_bytes()).decode()
    body = {"parameters": {"config": "{}", "file:1/model.onnx": content}}
    assert stack.http.post("/v2/repository/models/mounted/load", json=body, timeout=120).status_code == 400
    assert stack.http.get("/admin/v1/models/mounted").json()["source"] == str(repository)
    assert answer(stack, "mounted") == 4
    (tmp_path / "away").rename(repository / "mounted")
    write(repository, "mounted", 6)
    assert load(stack, "mounted").status_code == 200
    assert answer(stack, "mounted") == 6


def test_a_folder_whose_name_is_no_text_hides_no_model(stack: Stack, repository: Path) -> None:
    write(repository, "listed", 1)
    (repository / os.fsdecode(b"bad\xff")).mkdir()
    reply = stack.http.post("/v2/repository/index")
    assert reply.status_code == 200
    assert {"listed", r"bad\xff"} <= {one["name"] for one in reply.json()}
