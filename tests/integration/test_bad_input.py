"""What callers get wrong: each mistake has its status and an error that names the field, through both ways in.

After every one of them the server answers a good request, and nothing of the bad one is left.
"""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.kit import models, v2
from tests.kit.stack import WAIT_S, Stack, assert_quiet, running_stack

BODY_BYTES_MAX = 1 << 20
ROWS_MAX = 64
DATATYPES = ("FP32", "UINT8", "BOOL", "BYTES")  # of x0, x1, x2, x3
PATH = "/v2/models/m/infer"


@pytest.fixture(scope="module", params=[True, False], ids=["fast path", "asgi"])
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("bad")
    # What comes on the path that Vertex AI is told for predictions is answered by a route.
    environment = {} if request.param else {"AIP_PREDICT_ROUTE": PATH}
    settings = {"request_bytes_max": BODY_BYTES_MAX}
    made = {
        "m": models.identities(folder / "m.onnx", datatypes=DATATYPES),
        "pair": models.add_sub(folder / "pair.onnx"),
    }
    with running_stack(folder, settings=settings, models=made, environment=environment) as stack:
        yield stack


@pytest.fixture
def stack(front: Stack) -> Iterator[Stack]:
    yield front
    serves(front)
    assert_quiet(front)


def serves(stack: Stack) -> None:
    """It answers a good request."""
    reply = stack.http.post(PATH, content=text(good()))
    assert reply.status_code == 200
    assert [output["data"] for output in reply.json()["outputs"]] == [tensor["data"] for tensor in good()["inputs"]]


def good() -> dict[str, Any]:
    """A request that is right: three elements for each of the four inputs."""
    data = ([1.0, 2.0, 3.0], [1, 2, 3], [True, False, True], ["a", "b", "c"])
    return {
        "inputs": [
            {"name": f"x{i}", "shape": [1, 3], "datatype": datatype, "data": each}
            for i, (datatype, each) in enumerate(zip(DATATYPES, data, strict=True))
        ]
    }


def text(document: object) -> bytes:
    return json.dumps(document).encode()


def but(tensor: int, **members: object) -> bytes:
    """The good request with one input changed; a member that is `...` is left out."""
    document = good()
    changed = document["inputs"][tensor] | members
    document["inputs"][tensor] = {name: value for name, value in changed.items() if value is not ...}
    return text(document)


def plus(**members: object) -> bytes:
    return text(good() | members)


def refused(reply: httpx2.Response, status: int, *words: str, case: str = "") -> str:
    """Check an error reply; its message."""
    assert reply.status_code == status, f"{case}: {reply.text}"
    assert reply.headers["content-type"] == "application/json"
    document = reply.json()
    assert {"error"} <= document.keys() <= {"error", "signature", "example", "example_python"}
    message = document["error"]
    assert isinstance(message, str)
    for word in words:
        assert word in message, case
    return message


def deep(levels: int) -> bytes:
    return text(good()).replace(b"[1.0, 2.0, 3.0]", b"[" * levels + b"1.0, 2.0, 3.0" + b"]" * levels)


NOT_JSON = "failed to parse the request JSON"

BODIES = {
    "not JSON": (b"x", NOT_JSON),
    "half of it": (text(good())[:-20], NOT_JSON),
    "not an object": (b"[]", NOT_JSON),
    "null": (b"null", NOT_JSON),
    "not UTF-8": (b'{"inputs": "\xff"}', NOT_JSON),
    "UTF-16": (text(good()).decode().encode("utf-16"), NOT_JSON),
    "arrays without end": (b"[" * 100_000, NOT_JSON),
    "objects without end": (b'{"inputs":' * 20_000, NOT_JSON),
    "deep data": (deep(400), "'x0'"),
    "deeper data": (deep(5_000), ""),
    "no body": (b"", "Raw request must only have 1 input"),
    "no inputs": (b"{}", "'inputs'"),
    "inputs null": (b'{"inputs": null}', "'inputs'"),
    "inputs an object": (b'{"inputs": {}}', "'inputs'"),
    "inputs of numbers": (b'{"inputs": [1]}', "'inputs'"),
    "inputs empty": (b'{"inputs": []}', "missing required input(s) ['x0', 'x1', 'x2', 'x3']"),
    "an input missing": (text({"inputs": good()["inputs"][:3]}), "missing required input(s) ['x3']"),
    "an unknown input": (but(0, name="zz"), "unexpected inference input 'zz'"),
    "an input twice": (but(1, **good()["inputs"][0]), "input 'x0' already exists"),
    "no name": (but(0, name=...), "'name'"),
    "a name of another type": (but(0, name=7), "'name'"),
    "no datatype": (but(0, datatype=...), "'datatype'"),
    "another datatype": (but(0, datatype="FP64"), "input 'x0' data-type is 'FP64', but model 'm' expects 'FP32'"),
    "an unknown datatype": (but(0, datatype="FLOAT"), "datatype for input x0"),
    "no shape": (but(0, shape=...), "'shape'"),
    "a shape of another type": (but(0, shape=3), "'shape'"),
    "a shape of fractions": (but(0, shape=[1.0, 3]), "'shape'"),
    "a shape of booleans": (but(0, shape=[True, 3]), "'shape'"),
    "a negative dimension": (but(0, shape=[-1, 3]), "'shape'"),
    "too few dimensions": (but(0, shape=[3]), "unexpected shape for input 'x0'"),
    "too many dimensions": (but(0, shape=[1, 3, 1]), "unexpected shape for input 'x0'"),
    "a thousand dimensions": (but(0, shape=[1] * 1000), "unexpected shape for input 'x0'"),
    "another dimension": (but(0, shape=[1, 4], data=[1.0] * 4), "Expected [-1,3], got [1,4]"),
    "too many rows": (but(0, shape=[1_000_001, 3], data=[0.0]), "must be <= 1000000"),
    "rows that differ": (but(1, shape=[2, 3], data=[1] * 6), "input 'x1' batch size does not match"),
    "too few elements": (but(0, data=[1.0, 2.0]), "'data'"),
    "too many elements": (but(0, data=[1.0] * 4), "'data'"),
    "uneven elements": (but(0, data=[[1.0, 2.0], 3.0, 4.0]), "'data'"),
    "no data": (but(0, data=...), "'x0'"),
    "data null": (but(0, data=None), "'data'"),
    "data of another type": (but(0, data="1 2 3"), "'data'"),
    "text for numbers": (but(0, data=["1", 2, 3]), "input 'x0'"),
    "null for an integer": (but(1, data=[None, 2, 3]), "for input 'x1': element 0"),
    "a boolean for a number": (but(0, data=[True, 2, 3]), "input 'x0'"),
    "an object for a number": (but(0, data=[{}, 2, 3]), "input 'x0'"),
    "a fraction for an integer": (but(1, data=[1.5, 2, 3]), "input 'x1'"),
    "an integer out of range": (but(1, data=[256, 2, 3]), "input 'x1'"),
    "a negative unsigned integer": (but(1, data=[-1, 2, 3]), "input 'x1'"),
    "an integer of 5,000 digits": (but(1).replace(b"[1, 2, 3]", b"[" + b"9" * 5000 + b", 2, 3]"), ""),
    "numbers for booleans": (but(2, data=[1, 0, 1]), "input 'x2'"),
    "numbers for text": (but(3, data=[1, 2, 3]), "input 'x3'"),
    "half a surrogate": (but(3).replace(b'"a"', b'"\\ud800"'), ""),
    "elements beyond 2^63": (but(0, shape=[1 << 62, 3]), "exceed maximum size"),
    "a dimension beyond 2^64": (but(0, shape=[1 << 70, 3]), ""),
    "bytes beyond 2^63": (but(0, shape=[1 << 61, 3]), "overflow"),
    "a product that wraps to 0": (but(0, shape=[1 << 32, 1 << 32]), "exceed maximum size"),
    "nothing, hidden behind too much": (but(0, shape=[0, 1 << 62, 1 << 62]), "exceed maximum size"),
    "an id of another type": (plus(id=7), "'id'"),
    "parameters of another type": (plus(parameters=[]), "'parameters'"),
    "a timeout of another type": (plus(parameters={"timeout": "5"}), "'timeout'"),
    "a negative timeout": (plus(parameters={"timeout": -5}), "'timeout'"),
    "a timeout beyond 2^64": (plus(parameters={"timeout": 1 << 64}), "'timeout'"),
    "a negative priority": (plus(parameters={"priority": -1}), "'priority'"),
    "a parameter that is an object": (plus(parameters={"mine": {}}), "'mine'"),
    "a reserved parameter": (plus(parameters={"triton_x": 1}), "triton_"),
    "outputs of another type": (plus(outputs={}), "'outputs'"),
    "an output without a name": (plus(outputs=[{}]), "'name'"),
    "an unknown output": (plus(outputs=[{"name": "zz"}]), "unexpected inference output 'zz'"),
    "an output twice": (plus(outputs=[{"name": "y0"}] * 2), "output 'y0' already exists"),
    "a form of another type": (plus(outputs=[{"name": "y0", "parameters": {"binary_data": 1}}]), "'binary_data'"),
    "a tensor's parameters of another type": (but(0, parameters=[]), "'parameters'"),
    "data and binary data": (but(0, parameters={"binary_data_size": 12}), "only one of the following fields"),
    "binary data that is not there": (but(0, data=..., parameters={"binary_data_size": 12}), "input 'x0'"),
}  # fmt: skip


def test_json_bodies(stack: Stack) -> None:
    for case, (body, words) in BODIES.items():
        for _ in range(2):
            refused(stack.http.post(PATH, content=body), 400, words, case=case)
        serves(stack)


def parts(head: Mapping[str, object], tail: bytes, length: object = None) -> tuple[bytes, dict[str, str]]:
    """A body of JSON and binary parts; `length`: what its header says, when that is wrong."""
    start = text(head)
    return start + tail, {v2.LENGTH: str(len(start) if length is None else length)}


def with_binary(tensor: int, size: object, tail: bytes, **members: object) -> tuple[bytes, dict[str, str]]:
    """The good request with one input in binary form, which says that it has `size` bytes."""
    document = good()
    changed = document["inputs"][tensor]
    del changed["data"]
    changed |= {"parameters": {"binary_data_size": size}, **members}
    return parts(document, tail)


TWELVE = struct.pack("<3f", 1, 2, 3)

BINARY_BODIES = {
    "a short part": (with_binary(0, 12, TWELVE[:-4]), "unexpected size for input 'x0'"),
    "a long part": (with_binary(0, 12, TWELVE + b"1234"), "unexpected additional input data"),
    "a part of another size": (with_binary(0, 8, TWELVE[:8]), "input byte size mismatch for input 'x0'"),
    "a size of another type": (with_binary(0, "12", TWELVE), "'binary_data_size'"),
    "a negative size": (with_binary(0, -12, TWELVE), "'binary_data_size'"),
    "a size beyond 2^64": (with_binary(0, 1 << 64, TWELVE), "'binary_data_size'"),
    "a huge size": (with_binary(0, 1 << 62, TWELVE), "unexpected size for input 'x0'"),
    "text without lengths": (with_binary(3, 3, b"abc"), "input 'x3'"),
    "text with a length too long": (with_binary(3, 15, b"\1\0\0\0a\1\0\0\0b\xff\xff\xff\xffc"), "input 'x3'"),
    "text of too few elements": (with_binary(3, 10, b"\1\0\0\0a\1\0\0\0b"), "input 'x3'"),
    "a header length that is no number": (parts(good(), b"", "ten"), "Inference-Header-Content-Length"),
    "a header length with a sign": (parts(good(), b"", "+10"), "Inference-Header-Content-Length"),
    "a header length of many digits": (parts(good(), b"", "9" * 400), "Inference-Header-Content-Length"),
    "a negative header length": (parts(good(), b"", -1), "header size should be in range"),
    "a header length beyond the body": (parts(good(), b"", 100_000), "header size should be in range"),
    "a header length within the JSON": (parts(good(), b"", 20), "failed to parse"),
    "a raw request to several inputs": (parts(good(), b"", 0), "Raw request must only have 1 input"),
}  # fmt: skip


def test_binary_bodies(stack: Stack) -> None:
    for case, ((body, headers), words) in BINARY_BODIES.items():
        for _ in range(2):
            refused(stack.http.post(PATH, content=body, headers=headers), 400, words, case=case)
        serves(stack)


def test_text_that_the_runtime_cannot_take_is_that_callers_alone(stack: Stack) -> None:
    body, headers = with_binary(3, 15, b"\1\0\0\0a\1\0\0\0\xff\1\0\0\0c")
    refused(stack.http.post(PATH, content=body, headers=headers), 400, "'x3'", "UTF-8")


def test_what_is_not_offered_is_501(stack: Stack) -> None:
    for body in (
        but(0, data=..., parameters={"shared_memory_region": "r", "shared_memory_byte_size": 12}),
        plus(parameters={"sequence_id": 7}),
    ):
        refused(stack.http.post(PATH, content=body), 501)


BOMB = b" " * (64 * BODY_BYTES_MAX)

ENCODED = {
    "an unknown encoding": ("br", text(good()), 415, "gzip, deflate or identity"),
    "two encodings": ("gzip, deflate", text(good()), 415, "gzip, deflate or identity"),
    "not gzip": ("gzip", text(good()), 400, "not valid gzip"),
    "not deflate": ("deflate", text(good()), 400, "not valid deflate"),
    "a truncated gzip": ("gzip", gzip.compress(text(good()))[:-9], 400, "truncated"),
    "a gzip with a wrong checksum": ("gzip", gzip.compress(text(good()))[:-8] + b"\0" * 8, 400, "not valid gzip"),
    "a deflate that goes on": ("deflate", zlib.compress(text(good())) + b"more", 400, "after its end"),
    "a gzip bomb": ("gzip", gzip.compress(BOMB), 413, str(BODY_BYTES_MAX)),
    "a deflate bomb": ("deflate", zlib.compress(BOMB), 413, str(BODY_BYTES_MAX)),
    "a bomb in many pieces": ("gzip", gzip.compress(BOMB[: BODY_BYTES_MAX // 8]) * 64, 413, str(BODY_BYTES_MAX)),
    "gzip of what is not JSON": ("gzip", gzip.compress(b"x"), 400, NOT_JSON),
}  # fmt: skip


def test_encodings(stack: Stack) -> None:
    for case, (encoding, body, status, words) in ENCODED.items():
        refused(stack.http.post(PATH, content=body, headers={"Content-Encoding": encoding}), status, words, case=case)
        serves(stack)


def test_good_requests_at_the_limits_are_taken(stack: Stack) -> None:
    rows = np.ones((ROWS_MAX, 4), np.float32)
    body, headers = v2.request({"a": rows, "b": rows})
    assert stack.http.post("/v2/models/pair/infer", content=body, headers=headers).status_code == 200
    document = text(good())
    full = document[:-1] + b" " * (BODY_BYTES_MAX - len(document)) + document[-1:]
    assert len(full) == BODY_BYTES_MAX
    assert stack.http.post(PATH, content=full).status_code == 200
    packed = gzip.compress(full)
    assert stack.http.post(PATH, content=packed, headers={"Content-Encoding": "gzip"}).status_code == 200
    refused(stack.http.post(PATH, content=full + b" "), 413, str(BODY_BYTES_MAX))


def say(stack: Stack, *segments: bytes) -> httpx2.Response:
    """Send bytes as they are and read one reply, though the server may not take all of them."""
    with socket.create_connection(("127.0.0.1", stack.port), WAIT_S) as wire:
        with suppress(ConnectionError):
            for segment in segments:
                wire.sendall(segment)
        reply = http.client.HTTPResponse(wire)
        reply.begin()
        with reply:
            return httpx2.Response(reply.status, headers=reply.getheaders(), content=reply.read())


def test_a_body_over_the_limit_is_refused_before_it_comes(stack: Stack) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {BODY_BYTES_MAX + 1}\r\n"
    refused(say(stack, head.encode() + b"\r\n"), 413, str(BODY_BYTES_MAX))
    # a client that asks first is not told to go on
    refused(say(stack, head.encode() + b"Expect: 100-continue\r\n\r\n"), 413, str(BODY_BYTES_MAX))
    number = head.replace(str(BODY_BYTES_MAX + 1), "9" * 18)
    refused(say(stack, number.encode() + b"\r\n"), 413, str(BODY_BYTES_MAX))


def test_chunks_over_the_limit_are_refused_while_they_come(stack: Stack) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    # there is no last one
    refused(say(stack, head.encode(), *[chunk] * (BODY_BYTES_MAX // 0x10000 + 1)), 413, str(BODY_BYTES_MAX))


def test_a_body_in_chunks_is_put_together(stack: Stack) -> None:
    body = text(good())
    pieces = (body[i : i + 7] for i in range(0, len(body), 7))
    assert stack.http.post(PATH, content=pieces).status_code == 200


NOT_THERE = {
    "/v2/models/nothing/infer": "unknown model: 'nothing'",
    "/v2/models/m/versions/9/infer": "'m' version 9 is not found",
    "/v2/models/m/versions/0/infer": "'m' version 0 is not found",
    "/v2/models/m/versions/" + "9" * 5000 + "/infer": "not found",
    "/v2/models/m/versions/one/infer": "Not Found",
    "/v2/models/m/versions//infer": "Not Found",
    "/v2/models//infer": "Not Found",
    "/v2/models/m/infer/": "Not Found",
    "/v2/models/m/run": "Not Found",
    "/v2/models/%00/infer": "not found",
    "/v2/models/%ff/infer": "not found",
    "/v2/models/" + "x" * 5000 + "/infer": "not found",
}


def test_what_is_not_there(stack: Stack) -> None:
    body = text(good())
    for path, words in NOT_THERE.items():
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        message = refused(say(stack, head.encode() + body), 404, words, case=path[:100])
        assert len(message) < 1000


METHODS = [
    ("GET", PATH, "POST"),
    ("PUT", PATH, "POST"),
    ("DELETE", "/v2/models/m/versions/1/infer", "POST"),
    ("POST", "/v2", "GET, HEAD"),
    ("POST", "/v2/health/ready", "GET, HEAD"),
    ("DELETE", "/v2/models/m", "GET, HEAD"),
    ("POST", "/metrics", "GET, HEAD"),
    ("POST", "/admin/v1/models/m", "GET, PATCH, DELETE, HEAD"),
    ("POST", "/admin/v1/models/m/versions/1", "GET, PUT, DELETE, HEAD"),
    ("GET", "/admin/v1/models/m/versions", "POST"),
    ("GET", "/admin/v1/models/m/versions/1/activate", "POST"),
]


def test_methods_that_a_path_has_not(stack: Stack) -> None:
    for method, path, allowed in METHODS:
        reply = stack.http.request(method, path)
        refused(reply, 405, case=f"{method} {path}")
        assert set(reply.headers["allow"].split(", ")) == set(allowed.split(", "))


PARAMETERS = [
    ("PUT", "/admin/v1/models/x/versions/one", "'version'"),
    ("PUT", "/admin/v1/models/x/versions/0", "version 0"),
    ("PUT", "/admin/v1/models/x/versions/9999999999", "version 9999999999"),
    ("PUT", "/admin/v1/models/.x/versions/1", "'.x'"),
    ("POST", "/admin/v1/models/x%20y/versions", "'x y'"),
    ("POST", "/admin/v1/models/x/versions?wait=long", "'wait'"),
    ("POST", "/admin/v1/models/x/versions?wait=-1", "'wait'"),
    ("POST", "/admin/v1/models/x/versions?wait=nan", "'wait'"),
    ("POST", "/admin/v1/models/x/versions?activate=maybe", "'activate'"),
    ("POST", "/admin/v1/models/x/versions?config=x", "config"),
    ("POST", "/admin/v1/models/x/versions?config={%22rows_max%22:0}", "config.rows_max"),
    ("POST", "/admin/v1/models/x/versions?config={%22rows%22:1}", "config: there is no field 'rows'"),
    ("POST", "/admin/v1/models/x/versions?config={%22pools%22:[%22a/b%22]}", "config.pools"),
    ("GET", "/admin/v1/models/x/versions/one", "'version'"),
    ("DELETE", "/admin/v1/models/m/versions/one", "'version'"),
    ("DELETE", "/admin/v1/models/m/versions/1?force=maybe", "'force'"),
    ("POST", "/admin/v1/models/m/versions/one/activate", "'version'"),
]


def test_parameters_of_the_admin_api(stack: Stack) -> None:
    for method, path, words in PARAMETERS:
        content = b"x" if method in {"PUT", "POST"} else None
        refused(stack.http.request(method, path, content=content), 400, words, case=f"{method} {path}")
