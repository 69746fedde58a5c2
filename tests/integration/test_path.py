"""What callers get is what ONNX Runtime gives: every model, datatype, size and way through the product."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import onnxruntime
import pytest

from tests.kit import models, v2
from tests.kit.stack import Stack, running_stack
from tests.kit.v2 import Array, Bf16
from tests.kit.wait import wait_until

REQUESTS = 10_000
CONNECTIONS = 64
ROWS_MAX = 64


class Served(NamedTuple):
    """A model in the product and the same file in ONNX Runtime here."""

    name: str
    session: Any

    def expected(self, inputs: dict[str, Array]) -> dict[str, Array]:
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, inputs), strict=True))


@pytest.fixture
def serve(stack: Stack, tmp_path: Path) -> Callable[..., Served]:
    def serve_(name: str, build: Callable[..., Path], **arguments: Any) -> Served:
        path = build(tmp_path / f"{name}.onnx", **arguments)
        stack.push(name, path)
        return Served(name, session_of(path))

    return serve_


def session_of(path: Path) -> Any:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def infer(stack: Stack, path: str, inputs: Mapping[str, Array | Bf16], **options: Any) -> dict[str, Array]:
    """One request to /v2/models/`path`; its outputs."""
    body, headers = v2.request(inputs, **options)
    reply = stack.http.post(f"/v2/models/{path}/infer", content=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return v2.outputs(reply.content, reply.headers)


class Call(NamedTuple):
    """A request to send and what it must give."""

    model: str
    inputs: dict[str, Array]
    expected: dict[str, Array]


def made_up(
    served: list[tuple[Served, Callable[[int], dict[str, Array]]]], random: np.random.Generator
) -> Iterator[Call]:
    """REQUESTS calls of 1 to ROWS_MAX rows each; every row is its own, so that one in the wrong place is seen."""
    for model, make in served:
        rows = random.integers(1, ROWS_MAX + 1, REQUESTS // len(served))
        inputs = make(int(rows.sum()))
        # Rows are independent: one run over all of them is the truth for each request.
        expected = model.expected(inputs)
        ends = np.cumsum(rows)
        for start, end in zip(ends - rows, ends, strict=True):
            part = {name: array[start:end] for name, array in inputs.items()}
            yield Call(model.name, part, {name: array[start:end] for name, array in expected.items()})


async def _send_all(url: str, calls: list[Call], binary: Array) -> list[tuple[int, bytes, dict[str, str]]]:
    replies: list[Any] = [None] * len(calls)
    left = iter(range(len(calls)))

    async def caller(http: aiohttp.ClientSession) -> None:
        for i in left:
            call = calls[i]
            body, headers = v2.request(call.inputs, binary=bool(binary[i, 0]), binary_outputs=bool(binary[i, 1]))
            async with http.post(f"{url}/v2/models/{call.model}/infer", data=body, headers=headers) as reply:
                replies[i] = (reply.status, await reply.read(), dict(reply.headers))

    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=True) as http:
        await asyncio.gather(*(caller(http) for _ in range(CONNECTIONS)))
    return replies


def test_ten_thousand_mixed_requests_each_get_their_own_rows(stack: Stack, serve: Callable[..., Served]) -> None:
    random = np.random.default_rng(7)

    def floats(*inner: int) -> Callable[[int], Array]:
        # few digits, so that their JSON is short; different in every row, for a row's place to matter
        return lambda rows: (random.integers(-999, 999, (rows, *inner)) / 8).astype(np.float32)

    features, pairs, images = floats(64), floats(4), floats(3, 8, 8)
    served: list[tuple[Served, Callable[[int], dict[str, Array]]]] = [
        (serve("mix-mlp", models.mlp), lambda rows: {"input": features(rows)}),
        (serve("mix-add", models.add_sub), lambda rows: {"a": pairs(rows), "b": pairs(rows)}),
        (serve("mix-lookup", models.lookup), lambda rows: {"index": random.integers(-8, 8, (rows, 1))}),
        (
            serve("mix-text", models.identity, datatype="BYTES", shape=("N", 2)),
            lambda rows: {"x": np.array([f"r{i} é" for i in range(rows * 2)], object).reshape(rows, 2)},
        ),
        (serve("mix-conv", models.convolution, rows="N"), lambda rows: {"image": images(rows)}),
    ]
    calls = list(made_up(served, random))
    assert len(calls) == REQUESTS
    calls = [calls[i] for i in random.permutation(REQUESTS)]
    replies = asyncio.run(_send_all(stack.url, calls, random.integers(0, 2, (REQUESTS, 2))))
    for call, (status, body, headers) in zip(calls, replies, strict=True):
        assert status == 200, body
        got = v2.outputs(body, headers)
        assert list(got) == list(call.expected)
        for name, expected in call.expected.items():
            assert got[name].shape == expected.shape
            if expected.dtype == np.float32:
                # a matrix product of more rows may add in another order
                np.testing.assert_allclose(got[name].astype(np.float32), expected, rtol=2e-4, atol=2e-3)
            else:
                assert got[name].tolist() == expected.tolist()
    page = stack.metrics()
    for model, _ in served:
        assert page.value("millstream_requests_total", model=model.name, outcome="ok") == REQUESTS / len(served)
    runs = page.value("nv_inference_exec_count", model="mix-mlp")  # without readiness probes
    assert runs < REQUESTS / len(served)  # they shared runs


SHARED = "millstream_segment_bytes_total"
ROW = 16 * 1024  # floats: 64 KiB


def test_large_tensors_travel_in_shared_memory(stack: Stack, tmp_path: Path) -> None:
    # not activated: no readiness probe runs, so that every byte is the test's
    stack.push("large", models.identity(tmp_path / "m.onnx", shape=("N", ROW)), activate=False)
    x = np.random.default_rng(1).standard_normal((5, ROW), np.float32)
    before = stack.metrics()
    for rows in (1, 5):
        got = infer(stack, "large/versions/1", {"x": x[:rows]})
        np.testing.assert_array_equal(got["y"], x[:rows])

    def through(direction: str) -> float:
        return stack.metrics().value(SHARED, direction=direction) - before.value(SHARED, direction=direction)

    assert through("gateway_out") == 6 * ROW * 4
    # A worker counts after its replies have left.
    wait_until(lambda: through("worker_out") >= 6 * ROW * 4)
    assert through("worker_out") < 7 * ROW * 4  # it may have counted late what tests before this one asked for


def test_small_tensors_travel_in_the_queue(stack: Stack, tmp_path: Path) -> None:
    stack.push("small", models.identity(tmp_path / "m.onnx", shape=("N", 8191)), activate=False)
    x = np.random.default_rng(1).standard_normal((1, 8191), np.float32)  # four bytes less than 32 KiB
    before = stack.metrics()
    np.testing.assert_array_equal(infer(stack, "small/versions/1", {"x": x})["y"], x)
    after = stack.metrics()
    for direction in ("gateway_out", "worker_out"):
        # A worker may have counted late what a test before this one asked for, but not this tensor.
        grown = after.value(SHARED, direction=direction) - before.value(SHARED, direction=direction)
        assert grown != x.nbytes


def test_large_tensors_without_shared_memory(tmp_path: Path) -> None:
    path = models.identity(tmp_path / "m.onnx", shape=("N", ROW))
    with running_stack(tmp_path, settings={"shm_bytes_max": 0}, models={"large": path}) as stack:
        x = np.random.default_rng(1).standard_normal((40, ROW), np.float32)
        for rows in (1, 5, 40):  # 64 KiB in the entry itself; 320 KiB and 2.5 MiB in keys of their own
            np.testing.assert_array_equal(infer(stack, "large", {"x": x[:rows]})["y"], x[:rows])
        page = stack.metrics()
        assert page.value(SHARED) == 0
        sent, through_redis = 46 * ROW * 4, "millstream_redis_bytes_total"
        for direction in ("gateway_out", "gateway_in"):
            assert page.value(through_redis, direction=direction) > sent
        # A worker counts after its replies have left.
        wait_until(lambda: stack.metrics().value(through_redis, direction="worker_out") > sent)


def values(datatype: str) -> Array:
    """Two rows of three elements with the datatype's corners."""
    if datatype == "BYTES":
        return np.array([["", "é\u0000\n", "x" * 70_000], ["a", "b", "\U0001f600"]], object)
    if datatype == "BOOL":
        return np.array([[True, False, True], [False, False, True]])
    if datatype.startswith("FP"):
        dtype = np.dtype(f"f{int(datatype[2:]) // 8}")
        limits = np.finfo(dtype)
        return np.array([[np.nan, np.inf, -np.inf], [limits.max, limits.tiny, -0.0]], dtype)
    integers = np.iinfo(datatype.lower())
    return np.array([[integers.min, integers.max, 0], [1, 2, 3]], datatype.lower())


def equal(got: Array, expected: Array) -> bool:
    if expected.dtype == object or expected.dtype == bool:
        return bool(got.tolist() == expected.tolist())
    return got.tobytes() == expected.tobytes() and got.shape == expected.shape


def test_every_datatype_arrives_bit_for_bit(stack: Stack, tmp_path: Path) -> None:
    datatypes = tuple(sorted(set(models.ELEMENT_TYPE) - {"BF16"}))  # ONNX Runtime: not together with text
    stack.push("all", models.identities(tmp_path / "m.onnx", datatypes=datatypes))
    inputs = {f"x{i}": values(datatype) for i, datatype in enumerate(datatypes)}
    json_able = [f"x{i}" for i, datatype in enumerate(datatypes) if datatype != "FP16"]
    binary = [f"x{i}" for i in range(0, len(datatypes), 2)] + [f"x{datatypes.index('FP16')}"]
    asked = [{"name": f"y{i}", "parameters": {"binary_data": f"x{i}" not in json_able}} for i in range(len(datatypes))]
    for options in ({"binary": True}, {"binary": binary}, {"binary": True, "outputs": asked}):
        got = infer(stack, "all", inputs, **options)
        for i, datatype in enumerate(datatypes):
            assert equal(got[f"y{i}"], inputs[f"x{i}"]), (options, datatype)


def test_bf16(stack: Stack, tmp_path: Path) -> None:
    stack.push("bf16", models.identity(tmp_path / "m.onnx", datatype="BF16"))
    x = Bf16(np.array([[1.5, np.nan], [-np.inf, 3e38]]))
    np.testing.assert_array_equal(infer(stack, "bf16", {"x": x})["y"], x.bits)


def test_tensors_of_no_elements(stack: Stack, tmp_path: Path) -> None:
    stack.push("any-length", models.variable_length(tmp_path / "m.onnx"))
    for shape in ((0, 5), (3, 0), (0, 0)):
        for binary in (True, False):
            got = infer(stack, "any-length", {"x": np.zeros(shape, np.float32)}, binary=binary, binary_outputs=binary)
            # No rows are answered without a run: what only a run could tell of the shape is 0.
            assert got["doubled"].shape == (shape if shape[0] else (0, 0))
            assert got["total"].tolist() == [[0.0]] * shape[0]


def test_requests_of_different_shapes_do_not_mix(stack: Stack, tmp_path: Path) -> None:
    stack.push("lengths", models.variable_length(tmp_path / "m.onnx"))
    tensors = [np.arange(rows * length, dtype=np.float32).reshape(rows, length) for rows in (1, 2) for length in (1, 7)]
    sent = []
    for x in tensors * 10:
        body, headers = v2.request({"x": x})
        sent.append((x, stack.send("/v2/models/lengths/infer", body, headers)))
    for x, connection in sent:
        reply = connection.getresponse()
        got = v2.outputs(reply.read(), dict(reply.getheaders()))
        np.testing.assert_array_equal(got["doubled"], 2 * x)
        np.testing.assert_array_equal(got["total"], x.sum(axis=1, keepdims=True))
        connection.close()


def test_a_batch_fixed_at_one_is_rewritten(stack: Stack, tmp_path: Path) -> None:
    path = models.convolution(tmp_path / "fixed.onnx", rows=1)
    document = stack.push("fixed", path)
    assert document["batching"] is True
    assert document["inputs"][0]["shape"] == [-1, 3, 8, 8]
    x = np.random.default_rng(3).standard_normal((16, 3, 8, 8), np.float32)
    original = session_of(path)
    expected = np.concatenate([original.run(None, {"image": row[None]})[0] for row in x])
    np.testing.assert_allclose(infer(stack, "fixed", {"image": x})["scores"], expected, rtol=1e-4, atol=1e-5)


def test_what_cannot_batch_runs_one_by_one(stack: Stack, tmp_path: Path) -> None:
    documents = [
        stack.push("turn", models.transpose(tmp_path / "turn.onnx")),
        stack.push("mixing", models.row_mixing(tmp_path / "mixing.onnx")),
    ]
    assert [document["batching"] for document in documents] == [False, False]
    sent = []
    for i in range(20):
        x = np.arange(12, dtype=np.float32).reshape(3, 4) + i
        sent.append((x.T, stack.send("/v2/models/turn/infer", *v2.request({"x": x}))))
        row = np.array([[1, 2, 3, 4]], np.float32) + i
        sent.append((row / row.sum(), stack.send("/v2/models/mixing/infer", *v2.request({"x": row}))))
    for expected, connection in sent:
        reply = connection.getresponse()
        got = v2.outputs(reply.read(), dict(reply.getheaders()))
        np.testing.assert_allclose(got["y"], expected, rtol=1e-6)
        connection.close()
    alone = "millstream_batch_rows_bucket"
    # A worker counts after its replies have left.
    wait_until(lambda: stack.metrics().value(alone, model="turn", le="1.0") >= 20, what="each one ran")
    runs = stack.metrics()
    assert runs.value("millstream_batch_rows_count", model="turn") == runs.value(alone, model="turn", le="1.0")


def test_explicit_versions(stack: Stack, tmp_path: Path) -> None:
    for version, factor in ((1, 2.0), (5, 3.0)):
        stack.push("versions", models.scale(tmp_path / "m.onnx", factor=factor), version=version, activate=version == 1)
    x = np.ones((1, 2), np.float32)
    assert infer(stack, "versions", {"x": x})["y"].tolist() == [[2, 2]]
    assert infer(stack, "versions/versions/1", {"x": x})["y"].tolist() == [[2, 2]]
    assert infer(stack, "versions/versions/5", {"x": x})["y"].tolist() == [[3, 3]]
    body, headers = v2.request({"x": x})
    for other in ("2", "x", "-1"):
        reply = stack.http.post(f"/v2/models/versions/versions/{other}/infer", content=body, headers=headers)
        assert reply.status_code == 404, other
