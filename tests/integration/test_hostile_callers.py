"""Hostile callers against the running product: other paths to a model, limits after broken calls, damaged keys."""

from __future__ import annotations

import gzip
import json
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx2
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from millstream.services.access.document import KeyDocument, StoredSecret
from millstream.services.access.secret import derive_secret, format_key, hash_secret
from tests.kit import models
from tests.kit.stack import CALL_S_MAX, Stack, assert_quiet, running_stack
from tests.kit.wait import wait_until

ADMIN = "the-admin-key-of-this-test"
BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 4], "data": np.ones((2, 4)).tolist()}]}
).encode()
ROWS = json.dumps({"instances": np.ones((2, 4)).tolist()}).encode()
LARGE = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [20_000, 4], "data": [1.0] * 80_000}]}
).encode()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("hostile")
    with running_stack(folder, settings={"admin_key": ADMIN}) as stack:
        for name, factor in (("team-a", 2.0), ("team-b", 3.0)):
            stack.push(name, models.scale(folder / f"{name}.onnx", factor, 4))
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    yield served
    assert_quiet(served)


@pytest.fixture(scope="module")
def key(served: Stack) -> str:
    return create(served, "small", ["infer:team-a*"])


def create(stack: Stack, name: str, scopes: list[str], **more: Any) -> str:
    reply = stack.http.post("/admin/v1/keys", json={"name": name, "scopes": scopes, **more})
    assert reply.status_code == 201, reply.text
    created: str = reply.json()["key"]
    return created


def caller(stack: Stack, key: str | None) -> httpx2.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx2.Client(base_url=stack.url, timeout=CALL_S_MAX, trust_env=False, headers=headers)


def exchange(stack: Stack, sent: bytes) -> bytes:
    """Return all that the server replies to `sent`, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", stack.port), timeout=CALL_S_MAX) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def logged(stack: Stack, text: str) -> bool:
    return text in stack.logs() or any(text in line for line in stack.lines)


def head(path: str, key: str | None, body: bytes, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *more]
    lines += [] if key is None else [f"Authorization: Bearer {key}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def test_no_other_path_reaches_a_model_outside_the_scope(stack: Stack, key: str) -> None:
    with caller(stack, key) as client:
        assert client.post("/v2/models/team-a/infer", content=BODY).status_code == 200
        for path in (
            "/v2/models/team-b/infer",
            "/v2/models/team%2Db/infer",
            "/v2/models/team-b/versions/1/infer",
            "/v2//models/team-b/infer",
            "/v2/models/team-b/infer/",
            "/v2/models/team-b/infer?model=team-a",
            "/v2/models/team-a/../team-b/infer",
            "/v2/models/team-a%2F..%2Fteam-b/infer",
            "/v2/models/team-a%00/infer",
            "/v2/models/Team-B/infer",
            "/v2/models/team-b/generate",
            "/v1/models/team-b:predict",
            "/v1/models/team-a:predict:team-b:predict",
            "/v1/models/team-b/versions/1:predict",
            "/v1/models/team-b/labels/stable:predict",
            "/predictions/team-b",
            "/predictions/team-b/1",
            "/explanations/team-b",
            "/models/team-b/invoke",
            "/endpoints/team-b/invocations",
            "/endpoints/team-b/invocations-response-stream",
            "/invocations",
        ):
            body = BODY if path.startswith("/v2") else ROWS
            for headers in ({}, {"Content-Encoding": "gzip"}):
                content = gzip.compress(body) if headers else body
                reply = client.post(path, content=content, headers={"Content-Type": "application/json", **headers})
                assert reply.status_code in {400, 403, 404, 405, 415}, (path, reply.status_code, reply.text)
        for header in ("X-Amzn-SageMaker-Target-Model", "X-Amzn-SageMaker-Inference-Component"):
            for name in ("team-b", "/team-b", "team-b.tar.gz", "/team-b.tar.gz"):
                given = {header: name, "Content-Type": "application/json"}
                for path in ("/invocations", "/endpoints/team-a/invocations"):
                    assert client.post(path, content=ROWS, headers=given).status_code == 403, (header, name, path)
        for name in ("team-b", "team-b:1"):
            reply = client.post("/v1/embeddings", json={"model": name, "input": "x"})
            assert reply.status_code == 403, reply.text
        for path in ("/v2/models/team-b", "/v2/models/team-b/stats", "/v1/models/team-b", "/models/team-b"):
            for method in ("GET", "HEAD"):
                assert client.request(method, path).status_code == 403, (method, path)
        assert [one["modelName"] for one in client.get("/models").json()["models"]] == ["team-a"]


def test_messages_name_no_other_model(stack: Stack, key: str) -> None:
    tries: list[tuple[str, str, bytes, dict[str, str]]] = [
        ("POST", "/v2/models/team-ab/infer", BODY, {}),
        ("POST", "/v2/models/team-ab/infer", gzip.compress(BODY), {"Content-Encoding": "gzip"}),
        ("POST", "/v2/models/team-ab/infer", LARGE, {}),
        ("POST", "/v1/models/team-ab:predict", ROWS, {}),
        ("POST", "/predictions/team-ab", ROWS, {}),
        ("POST", "/endpoints/team-ab/invocations", ROWS, {}),
        ("POST", "/invocations", ROWS, {}),
        ("GET", "/v2/models/team-ab", b"", {}),
        ("GET", "/v2/models/team-ab/stats", b"", {}),
        ("GET", "/v2/models/team-ab/config", b"", {}),
        ("GET", "/v2/models/team-ab/trace/setting", b"", {}),
        ("GET", "/v1/models/team-ab", b"", {}),
        ("GET", "/v1/models/team-ab/metadata", b"", {}),
        ("GET", "/models/team-ab", b"", {}),
    ]
    with caller(stack, key) as client:
        for method, path, body, headers in tries:
            given = {"Content-Type": "application/json", **headers}
            text = client.request(method, path, content=body, headers=given).text
            assert "team-b" not in text, (path, text)
    with grpc.insecure_channel(stack.grpc) as channel:
        service = "/inference.GRPCInferenceService/"
        for method, message in (
            ("ModelInfer", pb.ModelInferRequest(model_name="team-ab")),
            ("ModelMetadata", pb.ModelMetadataRequest(name="team-ab")),
            ("ModelStatistics", pb.ModelStatisticsRequest(name="team-ab")),
            ("ModelConfig", pb.ModelConfigRequest(name="team-ab")),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(service + method)(
                    message.SerializeToString(), metadata=(("authorization", f"Bearer {key}"),)
                )
            assert "team-b" not in refused.value.details(), method
    assert "team-b" in stack.http.post("/v2/models/team-bb/infer", content=BODY).text  # who may know is still told


def test_a_pipelined_request_does_not_inherit_a_key(stack: Stack, key: str) -> None:
    url = "/v2/models/team-a/infer"
    reply = exchange(
        stack,
        head(url, key, BODY) + BODY + head(url, None, BODY) + BODY + head(url, key, BODY, "Connection: close") + BODY,
    )
    statuses = [part[:3] for part in reply.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"401", b"200"]
    reply = exchange(
        stack,
        head("/v1/models/team-a:predict", key, ROWS)
        + ROWS
        + head("/v1/models/team-a:predict", None, ROWS, "Connection: close")
        + ROWS,
    )
    statuses = [part[:3] for part in reply.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"401"]


def test_a_body_is_not_read_for_a_signature_of_no_key(stack: Stack, key: str) -> None:
    signature = (
        "Authorization: AWS4-HMAC-SHA256 Credential=mr_ffffffffffffffff/20260101/r/sagemaker/aws4_request, "
        f"SignedHeaders=host;x-amz-date, Signature={'0' * 64}"
    )
    lines = ["POST /endpoints/team-a/invocations HTTP/1.1", "Host: 127.0.0.1", "Content-Length: 30000000", signature]
    with socket.create_connection(("127.0.0.1", stack.port), timeout=CALL_S_MAX) as connection:
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 403")


def test_a_long_model_name_is_refused_in_a_short_message(stack: Stack, key: str) -> None:
    with grpc.insecure_channel(stack.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for size in (200, 1_000_000):
            message = pb.ModelInferRequest(model_name="x" * size).SerializeToString()
            with pytest.raises(grpc.RpcError) as refused:
                call(message, metadata=(("authorization", f"Bearer {key}"),))
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert len(refused.value.details()) < 400


def test_broken_calls_leave_no_call_in_flight(stack: Stack) -> None:
    alone = create(stack, "alone", ["infer:team-a"], limits={"concurrency": 1})
    reset = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST
    metadata = (("authorization", f"Bearer {alone}"),)
    message = pb.ModelInferRequest(model_name="team-a")
    message.inputs.add(name="x", datatype="FP32", shape=[2, 4]).contents.fp32_contents.extend([1.0] * 8)
    infer = "/v2/models/team-a/infer"
    with caller(stack, alone) as client, grpc.insecure_channel(stack.grpc) as channel:

        def free() -> bool:
            return client.post(infer, content=BODY).status_code == 200

        for path, body in ((infer, BODY), (infer, LARGE), ("/v1/models/team-a:predict", ROWS)):
            whole = head(path, alone, body) + body
            for sent in (whole, whole[:-5], head(path, alone, body), whole + whole + whole):
                with socket.create_connection(("127.0.0.1", stack.port), timeout=CALL_S_MAX) as connection:
                    connection.sendall(sent)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                wait_until(free, what=f"the call of {path} has ended")
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for number in range(8):
            future = call.future(message.SerializeToString(), metadata=metadata, timeout=0.001 if number % 2 else None)
            future.cancel()
            with suppress(grpc.RpcError, grpc.FutureCancelledError):  # it may have ended before
                future.result()
            wait_until(free, what="the cancelled call has ended")


def test_keys_stay_in_force_while_their_folder_cannot_be_read(stack: Stack, key: str) -> None:
    folder = stack.home / "repository" / "keys"
    away = folder.with_name("keys.away")
    with caller(stack, key) as client, caller(stack, None) as none:
        for what in ("is no longer there", "Not a directory"):
            folder.rename(away)
            if what == "Not a directory":
                folder.write_bytes(b"")
            wait_until(partial(logged, stack, what), what=what)
            assert none.post("/v2/models/team-a/infer", content=BODY).status_code == 401
            assert client.post("/v2/models/team-a/infer", content=BODY).status_code == 200
            folder.unlink(missing_ok=True)
            away.rename(folder)
        assert client.post("/v2/models/team-a/infer", content=BODY).status_code == 200


def test_keys_are_in_force_without_the_access_secret_and_sagemaker_needs_none(tmp_path: Path) -> None:
    settings = {"sagemaker_multi_model": True, "sagemaker_model": "one"}
    with running_stack(tmp_path, settings=settings) as stack:
        stack.push("one", models.scale(tmp_path / "one.onnx", 2.0, 4))
        (stack.home / "access.key").write_text("short")
        secret = derive_secret(b"s" * 32, "0" * 16, "salt")
        stored = StoredSecret(sha256=hash_secret(secret), salt="salt", created_at=0)
        document = KeyDocument(id="0" * 16, name="k", scopes=("infer:one",), created_at=0, secrets=(stored,))
        folder = stack.home / "repository" / "keys"
        folder.mkdir()
        (tmp_path / "document").write_text(document.model_dump_json())
        (tmp_path / "document").rename(folder / f"{document.id}.json")  # no gateway reads half of it
        with caller(stack, None) as none, caller(stack, format_key(document.id, secret)) as client:
            wait_until(
                lambda: none.post("/v2/models/one/infer", content=BODY).status_code == 401, what="calls need a key"
            )
            assert client.post("/v2/models/one/infer", content=BODY).status_code == 200
            given = {"Content-Type": "application/json"}
            for path in ("/invocations", "/models/one/invoke"):
                assert none.post(path, content=ROWS, headers=given).status_code == 200, path
            assert none.post("/v1/models/one:predict", content=ROWS).status_code == 401
