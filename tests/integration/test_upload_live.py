"""Uploads as people make them, into the running product: every form, every state, every mistake, and a crash
half way.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import socket
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from millstream.services.queue.keys import InstallationKeys
from tests.kit import models, v2
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.wait import wait_for_none, wait_until

MIB = 1 << 20
ADMIN = "/admin/v1/models"


@pytest.fixture(scope="module")
def uploading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"upload_bytes_max": 4 * MIB, "admin_key": "sesame"}
    with running_stack(tmp_path_factory.mktemp("uploads"), gateways=2, settings=settings) as stack:
        yield stack


@pytest.fixture
def stack(uploading: Stack) -> Iterator[Stack]:
    """Whatever a test does: no upload is in progress afterwards and no staged file is left."""
    yield uploading
    assert_quiet(uploading)
    assert not uploading.redis.exists(InstallationKeys(uploading.installation).uploads)
    wait_for_none(lambda: staged(uploading))


def staged(stack: Stack) -> list[Path]:
    return list((stack.home / "repository" / ".staging").glob("*"))


@pytest.fixture
def scale(tmp_path: Path) -> Callable[[float], bytes]:
    return lambda factor: models.scale(tmp_path / "scale.onnx", factor=factor).read_bytes()


def doubled(stack: Stack, name: str, version: int | None = None) -> list[list[float]]:
    """What the model makes of [[1, 2]]."""
    body, headers = v2.request({"x": np.array([[1, 2]], np.float32)})
    path = f"/v2/models/{name}" + (f"/versions/{version}" if version else "")
    reply = stack.http.post(f"{path}/infer", content=body, headers=headers)
    assert reply.status_code == 200, reply.text
    rows: list[list[float]] = v2.outputs(reply.content, reply.headers)["y"].tolist()
    return rows


def refused(reply: httpx2.Response, status: int, *words: str) -> None:
    assert reply.status_code == status, reply.text
    message = reply.json()["error"]
    for word in words:
        assert word in message


def published(stack: Stack) -> list[tuple[str, int, int, str]]:
    """What the product says that there is: model, active version, version, digest."""
    return [
        (model["name"], model["active"], version["version"], version["digest"])
        for model in stack.http.get(ADMIN).json()["models"]
        for version in model["versions"]
    ]


def test_raw_bytes_with_their_digest(stack: Stack, scale: Callable[[float], bytes]) -> None:
    content = scale(2.0)
    digest = hashlib.sha256(content).hexdigest()
    reply = stack.http.put(f"{ADMIN}/raw/versions/3?wait=300", content=content, headers={"X-Content-SHA256": digest})
    assert reply.status_code == 201
    assert reply.headers["location"] == f"{ADMIN}/raw/versions/3"
    document = reply.json()
    assert (document["state"], document["digest"], document["active"]) == ("ready", digest, True)
    assert doubled(stack, "raw") == [[2, 4]]
    # the next number, sent in chunks of unknown total
    pieces = (scale(3.0)[i : i + 50] for i in range(0, len(content), 50))
    reply = stack.http.post(f"{ADMIN}/raw/versions?wait=300", content=pieces)
    assert (reply.status_code, reply.json()["version"]) == (201, 4)
    stack.settled("raw", 4)
    assert doubled(stack, "raw") == [[3, 6]]


def test_a_form_with_its_config(stack: Stack, scale: Callable[[float], bytes]) -> None:
    config = json.dumps({"rows_max": 4})
    files: dict[str, Any] = {"model": ("m.onnx", scale(2.0)), "config": (None, config)}
    reply = stack.http.post(f"{ADMIN}/form/versions?wait=300", files=files)
    assert reply.status_code == 201, reply.text
    assert (reply.json()["state"], reply.json()["rows_max"]) == ("ready", 4)
    stack.settled("form", 1)
    assert doubled(stack, "form") == [[2, 4]]
    body, headers = v2.request({"x": np.ones((5, 2), np.float32)})  # more than a run takes
    reply = stack.http.post("/v2/models/form/infer", content=body, headers=headers)
    np.testing.assert_array_equal(v2.outputs(reply.content, reply.headers)["y"], np.full((5, 2), 2, np.float32))


def external(tmp_path: Path) -> tuple[bytes, bytes]:
    """A model whose factor lies in a file of its own: the ONNX file, and that file."""
    model = onnx.load(models.scale(tmp_path / "whole.onnx", factor=5.0))
    factor = model.graph.initializer[0]
    factor.CopyFrom(numpy_helper.from_array(np.full(512, 5.0, np.float32)[:2].reshape(1, 2), factor.name))
    onnx.save_model(
        model, tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    return (tmp_path / "model.onnx").read_bytes(), (tmp_path / "weights.bin").read_bytes()


def archive(kind: str, files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
            for name, content in files.items():
                target.writestr(name, content)
    else:
        with tarfile.open(fileobj=made, mode="w:gz") as target:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                target.addfile(member, io.BytesIO(content))
    return made.getvalue()


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_with_external_data(stack: Stack, tmp_path: Path, kind: str) -> None:
    model, weights = external(tmp_path)
    content = archive(kind, {"model.onnx": model, "weights.bin": weights})
    name = f"external-{kind}"
    reply = stack.http.post(f"{ADMIN}/{name}/versions?wait=300", content=content)
    assert (reply.status_code, reply.json().get("state")) == (201, "ready"), reply.text
    stack.settled(name, 1)
    assert doubled(stack, name) == [[5, 10]]


def test_external_data_without_an_archive(stack: Stack, tmp_path: Path) -> None:
    reply = stack.http.post(f"{ADMIN}/alone/versions", content=external(tmp_path)[0])
    refused(reply, 400, "'weights.bin'", "zip")
    assert stack.http.get(f"{ADMIN}/alone").status_code == 404


def test_broken_uploads_change_nothing(stack: Stack, tmp_path: Path, scale: Callable[[float], bytes]) -> None:
    content = scale(2.0)
    stack.push("kept", tmp_path / "scale.onnx", version=1)
    before = published(stack)
    evil = {"../../escaped.onnx": content}
    form = {"model": ("m.onnx", content), "surprise": (None, "x")}
    put, post = f"{ADMIN}/kept/versions/2", f"{ADMIN}/kept/versions"
    model, weights = external(tmp_path)
    cases: list[tuple[int, str, dict[str, Any]]] = [
        (400, "empty", {"content": b""}),
        (400, "ONNX", {"content": b"this is not a model"}),
        (400, "", {"content": content[: len(content) // 2]}),
        (400, "sha256", {"content": content, "headers": {"X-Content-SHA256": "0" * 64}}),
        (400, "x-content-sha256", {"content": content, "headers": {"X-Content-SHA256": "abc"}}),
        (400, "'surprise'", {"files": form}),
        (400, "config.rows_max", {"files": {"model": ("m", content), "config": (None, '{"rows_max": 0}')}}),
        (400, "'model'", {"files": {"config": (None, "{}")}}),
        (400, "", {"content": archive("zip", evil)}),
        (400, "", {"content": archive("tar", evil)}),
        (400, "", {"content": archive("zip", {"/etc/model.onnx": content})}),
        (400, "", {"content": archive("zip", {"readme.txt": b"no model"})}),
        (400, "", {"content": archive("zip", {"a.onnx": content})[:-30]}),
        (400, "weights.bin", {"content": archive("zip", {"model.onnx": model})}),
        (413, str(4 * MIB), {"content": archive("zip", {"m.onnx": content, "w": bytes(40 * MIB)})}),
        (413, str(4 * MIB), {"content": b"x" * (4 * MIB + 1)}),
        (415, "Content-Encoding", {"content": content, "headers": {"Content-Encoding": "gzip"}}),
    ]
    assert weights
    for number, (status, words, options) in enumerate(cases):
        reply = stack.http.put(put, **options) if number % 2 else stack.http.post(post, **options)
        refused(reply, status, words)
        assert published(stack) == before, number
    assert not list(stack.home.rglob("escaped*"))
    assert doubled(stack, "kept") == [[2, 4]]


def test_conflicts(stack: Stack, tmp_path: Path, scale: Callable[[float], bytes]) -> None:
    scale(2.0)
    stack.push("taken", tmp_path / "scale.onnx", version=1)
    refused(stack.http.put(f"{ADMIN}/taken/versions/1", content=scale(3.0)), 409, "already exists", "immutable")
    assert doubled(stack, "taken") == [[2, 4]]
    stack.push("taken", tmp_path / "scale.onnx", version=2)
    refused(stack.http.delete(f"{ADMIN}/taken/versions/2"), 409, "is serving")
    assert stack.http.delete(f"{ADMIN}/taken/versions/1").status_code == 204
    # a deleted number may be asked for by name, and is never assigned automatically
    assert stack.http.post(f"{ADMIN}/taken/versions", content=scale(4.0)).json()["version"] == 3


def test_activate_and_delete(stack: Stack, tmp_path: Path, scale: Callable[[float], bytes]) -> None:
    for version, factor in ((1, 2.0), (2, 3.0)):
        scale(factor)
        stack.push("switched", tmp_path / "scale.onnx", version=version, activate=version == 1)
    assert doubled(stack, "switched") == [[2, 4]]
    assert doubled(stack, "switched", 2) == [[3, 6]]
    reply = stack.http.post(f"{ADMIN}/switched/versions/2/activate")
    assert (reply.status_code, reply.json()["active"], reply.json()["serving"]) == (200, 2, 2)
    assert doubled(stack, "switched") == [[3, 6]]
    refused(stack.http.post(f"{ADMIN}/switched/versions/9/activate"), 404, "version 9")
    assert stack.http.delete(f"{ADMIN}/switched/versions/2?force=true").status_code == 204
    assert stack.http.get(f"{ADMIN}/switched/versions/2").status_code == 404
    wait_until(lambda: stack.http.get(f"{ADMIN}/switched").json()["serving"] == 1)
    assert doubled(stack, "switched") == [[2, 4]]
    assert stack.http.delete(f"{ADMIN}/switched").status_code == 204
    refused(stack.http.get(f"{ADMIN}/switched"), 404, "'switched'")
    refused(stack.http.delete(f"{ADMIN}/switched"), 404)
    # the name is free again, and what comes under it is what was uploaded
    scale(7.0)
    stack.push("switched", tmp_path / "scale.onnx", version=1)
    assert doubled(stack, "switched") == [[7, 14]]


def head(stack: Stack, name: str, size_bytes: int) -> bytes:
    lines = (
        f"PUT {ADMIN}/{name}/versions/1?wait=300 HTTP/1.1",
        "Host: 127.0.0.1",
        "Authorization: Bearer sesame",
        f"Content-Length: {size_bytes}",
    )
    return "\r\n".join((*lines, "", "")).encode()


def test_an_upload_in_progress_is_visible_to_all_and_then_ready(stack: Stack, scale: Callable[[float], bytes]) -> None:
    content = scale(2.0)
    with socket.create_connection(("127.0.0.1", stack.port), 300) as wire:
        wire.sendall(head(stack, "watched", len(content)) + content[:20])
        for number in range(2):
            with stack.gateway(number) as gateway:
                document = wait_until(lambda: _document(gateway, "watched"))
                assert [(one["version"], one["state"]) for one in document["versions"]] == [(1, "receiving")]
                refused(gateway.get("/v2/models/watched"), 404, "'watched'")
        wire.sendall(content[20:])
        assert wire.recv(15).startswith(b"HTTP/1.1 201")
    stack.settled("watched", 1)
    assert doubled(stack, "watched") == [[2, 4]]


def _document(http_: httpx2.Client, name: str) -> dict[str, Any] | None:
    reply = http_.get(f"{ADMIN}/{name}")
    document: dict[str, Any] = reply.json()
    # its line in the list of uploads is written when the first byte has come, and read by other gateways a little later
    return document if reply.status_code == 200 else None


def test_a_caller_that_goes_away_leaves_nothing(stack: Stack, scale: Callable[[float], bytes]) -> None:
    content = scale(2.0)
    with socket.create_connection(("127.0.0.1", stack.port), 300) as wire:
        wire.sendall(head(stack, "left", len(content)) + content[:-1])
        wait_until(lambda: staged(stack))
        wait_until(lambda: _document(stack.http, "left"))
    wait_until(lambda: not staged(stack))
    wait_until(lambda: _document(stack.http, "left") is None)


def test_a_gateway_that_crashes_half_way_through_leaves_nothing(tmp_path: Path) -> None:
    content = models.scale(tmp_path / "scale.onnx").read_bytes()
    with running_stack(tmp_path, settings={"admin_key": "sesame"}) as stack:
        with socket.create_connection(("127.0.0.1", stack.port), 300) as wire:
            wire.sendall(head(stack, "crashed", len(content)) + content[:-1])
            wait_until(lambda: staged(stack))
            wait_until(lambda: _document(stack.http, "crashed"))
            pid = stack.pids()["gateway-0"]
            os.kill(pid, signal.SIGKILL)
            stack.wait_for_line("gateway-0 was ended by SIGKILL: restarting it")
            with suppress(ConnectionResetError):  # what the gateway had not read yet is lost with it
                assert wire.recv(1) == b""
        wait_until(lambda: stack.pids().get("gateway-0", pid) != pid)
        wait_until(lambda: not staged(stack), what="nothing is staged")
        wait_until(lambda: _document(stack.http, "crashed") is None, what="the upload is not shown")
        assert not (stack.home / "repository" / "models" / "crashed").exists()
        # and the number that it wanted is free
        stack.push("crashed", tmp_path / "scale.onnx", version=1)
        assert doubled(stack, "crashed") == [[2, 4]]


def test_the_key_is_asked_for(stack: Stack, scale: Callable[[float], bytes]) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic sesame"}):
        for method, path in (("GET", ADMIN), ("DELETE", f"{ADMIN}/x"), ("GET", "/admin/v1/workers")):
            reply = httpx2.request(method, stack.url + path, headers=headers, timeout=300, trust_env=False)
            refused(reply, 401, "key")
        upload = f"{stack.url}{ADMIN}/x/versions/1"
        refused(httpx2.put(upload, content=scale(2.0), headers=headers, timeout=300, trust_env=False), 401, "key")
    ready = f"{stack.url}/v2/health/ready"
    wait_until(lambda: httpx2.get(ready, timeout=300, trust_env=False).status_code == 200, what="it needs no key")
