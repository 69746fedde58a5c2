"""What callers get wrong: each mistake has its status and an error that names the field, through both ways in.

After every one of them the server answers a good request, and nothing of the bad one is left.
"""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.kit import models, v2
from tests.kit.stack import Stack, assert_quiet, running_stack

BODY_BYTES_MAX = 1 << 20
ROWS_MAX = 64
DATATYPES = ("FP32", "UINT8", "BOOL", "BYTES")  # of x0, x1, x2, x3
PATH = "/v2/models/m/infer"


@pytest.fixture(scope="module", params=[True, False], ids=["fast lane", "asgi"])
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("bad")
    settings = {"body_bytes_max": BODY_BYTES_MAX, "fast_lane": request.param}
    made = {
        "m": models.identities(folder / "m.onnx", datatypes=DATATYPES),
        "pair": models.add_sub(folder / "pair.onnx"),
    }
    with running_stack(folder, settings=settings, models=made) as stack:
        yield stack


@pytest.fixture
def stack(front: Stack) -> Iterator[Stack]:
    yield front
    reply = front.http.post(PATH, content=text(good()))
    assert reply.status_code == 200
    assert [output["data"] for output in reply.json()["outputs"]] == [tensor["data"] for tensor in good()["inputs"]]
    assert_quiet(front)


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


def refused(reply: httpx.Response, status: int, *words: str) -> str:
    """Check an error reply; its message."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    document = reply.json()
    assert list(document) == ["error"]
    message = document["error"]
    assert isinstance(message, str)
    for word in words:
        assert word in message
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
    "arrays without end": (b"[" * 500_000, NOT_JSON),
    "objects without end": (b'{"inputs":' * 50_000, NOT_JSON),
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
    "too many rows": (but(0, shape=[65, 3], data=[0.0] * 195), "must be <= 64"),
    "rows that differ": (but(1, shape=[2, 3], data=[1] * 6), "input 'x1' batch size does not match"),
    "too few elements": (but(0, data=[1.0, 2.0]), "'data'"),
    "too many elements": (but(0, data=[1.0] * 4), "'data'"),
    "uneven elements": (but(0, data=[[1.0, 2.0], 3.0, 4.0]), "'data'"),
    "no data": (but(0, data=...), "'x0'"),
    "data null": (but(0, data=None), "'data'"),
    "data of another type": (but(0, data="1 2 3"), "'data'"),
    "text for numbers": (but(0, data=["1", 2, 3]), "input 'x0'"),
    "null for a number": (but(0, data=[None, 2, 3]), "input 'x0'"),
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


@pytest.mark.parametrize("name", BODIES)
def test_json_bodies(stack: Stack, name: str) -> None:
    body, words = BODIES[name]
    for _ in range(2):
        refused(stack.http.post(PATH, content=body), 400, words)


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
    "a byte that is no boolean": (with_binary(2, 3, b"\0\1\2"), "input 'x2'"),
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


@pytest.mark.parametrize("name", BINARY_BODIES)
def test_binary_bodies(stack: Stack, name: str) -> None:
    (body, headers), words = BINARY_BODIES[name]
    for _ in range(2):
        refused(stack.http.post(PATH, content=body, headers=headers), 400, words)


def test_text_that_the_runtime_cannot_take_is_that_callers_alone(stack: Stack) -> None:
    body, headers = with_binary(3, 15, b"\1\0\0\0a\1\0\0\0\xff\1\0\0\0c")
    refused(stack.http.post(PATH, content=body, headers=headers), 400, "'x3'", "UTF-8")


def test_what_is_not_offered_is_501(stack: Stack) -> None:
    for body in (
        but(0, data=..., parameters={"shared_memory_region": "r", "shared_memory_byte_size": 12}),
        plus(outputs=[{"name": "y0", "parameters": {"classification": 2}}]),
        plus(parameters={"sequence_id": 7}),
    ):
        refused(stack.http.post(PATH, content=body), 501, "not ")


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


@pytest.mark.parametrize("name", ENCODED)
def test_encodings(stack: Stack, name: str) -> None:
    encoding, body, status, words = ENCODED[name]
    refused(stack.http.post(PATH, content=body, headers={"Content-Encoding": encoding}), status, words)


def test_good_requests_at_the_limits_are_taken(stack: Stack, tmp_path: Path) -> None:
    rows = np.ones((ROWS_MAX, 4), np.float32)
    body, headers = v2.request({"a": rows, "b": rows})
    padded = body + b""
    assert stack.http.post("/v2/models/pair/infer", content=padded, headers=headers).status_code == 200
    document = text(good())
    full = document[:-1] + b" " * (BODY_BYTES_MAX - len(document)) + document[-1:]
    assert len(full) == BODY_BYTES_MAX
    assert stack.http.post(PATH, content=full).status_code == 200
    packed = gzip.compress(full)
    assert stack.http.post(PATH, content=packed, headers={"Content-Encoding": "gzip"}).status_code == 200
    refused(stack.http.post(PATH, content=full + b" "), 413, str(BODY_BYTES_MAX))
