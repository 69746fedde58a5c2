"""System shared memory and classification with tritonclient, as it is, over two gateways."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from tests.kit import models
from tests.kit.stack import Stack, running_stack

A = np.arange(8, dtype=np.float32).reshape(2, 4)
B = A[::-1] * 10 + 1
_serial = itertools.count()
KEY = f"/test-client-memory-{os.getpid()}"  # names of shared memory are those of the whole machine


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("memory")
    with running_stack(folder, gateways=2, settings={"shm_allow_clients": True, "open_control": True}) as stack:
        path = folder / "m.onnx"
        stack.push("add", models.add_sub(path))
        stack.push("text", models.identity(path, datatype="BYTES"))
        yield stack


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, serving: Stack) -> Iterator[Any]:
    where = serving.url.removeprefix("http://") if request.param == "http" else serving.grpc
    with (triton if request.param == "http" else triton_grpc).InferenceServerClient(where) as client:
        yield client


def kind(client: Any) -> Any:
    """The module of tritonclient that `client` is from."""
    return triton if isinstance(client, triton.InferenceServerClient) else triton_grpc


@contextmanager
def memory(client: Any, size_bytes: int) -> Iterator[tuple[str, Any]]:
    """A region that is made, registered, forgotten and removed. Gives its name and handle."""
    name = f"region-{next(_serial)}"
    key = f"{KEY}-{name}"
    handle = shm.create_shared_memory_region(name, key, size_bytes)
    try:
        client.register_system_shared_memory(name, key, size_bytes)
        yield name, handle
    finally:
        client.unregister_system_shared_memory(name)
        shm.destroy_shared_memory_region(handle)


def status(client: Any, name: str = "") -> list[tuple[str, str, int, int]]:
    """Regions that the server shows: name, key, offset, size."""
    found = client.get_system_shared_memory_status(name)
    regions = found if kind(client) is triton else [vars_of(region) for region in found.regions.values()]
    return [(region["name"], region["key"], region["offset"], region["byte_size"]) for region in regions]


def vars_of(region: Any) -> dict[str, Any]:
    return {field: getattr(region, field) for field in ("name", "key", "offset", "byte_size")}


def in_memory(client: Any, name: str, array: np.ndarray, region: str, offset: int = 0, size: int | None = None) -> Any:
    tensor = kind(client).InferInput(name, list(array.shape), "BYTES" if array.dtype == object else "FP32")
    tensor.set_shared_memory(region, array.nbytes if size is None else size, offset)
    return tensor


def test_inputs_and_outputs_in_shared_memory(client: Any) -> None:
    with memory(client, 2 * A.nbytes) as (inputs, in_handle), memory(client, 2 * A.nbytes) as (outputs, out_handle):
        shm.set_shared_memory_region(in_handle, [A, B])
        total = kind(client).InferRequestedOutput("sum")
        total.set_shared_memory(outputs, A.nbytes)
        difference = kind(client).InferRequestedOutput("difference")
        difference.set_shared_memory(outputs, A.nbytes, offset=A.nbytes)
        for _ in range(20):
            reply = client.infer(
                "add",
                [in_memory(client, "a", A, inputs), in_memory(client, "b", B, inputs, A.nbytes)],
                outputs=[total, difference],
            )
            shown = reply.get_output("sum")
            if kind(client) is triton:
                assert shown == {"name": "sum", "datatype": "FP32", "shape": [2, 4]}
            else:
                assert (shown.datatype, list(shown.shape)) == ("FP32", [2, 4])
        assert np.array_equal(shm.get_contents_as_numpy(out_handle, np.float32, [2, 4]), A + B)
        assert np.array_equal(shm.get_contents_as_numpy(out_handle, np.float32, [2, 4], A.nbytes), A - B)


def test_one_input_in_memory_and_one_in_the_body(client: Any) -> None:
    with memory(client, A.nbytes) as (region, handle):
        forms = ({}, {"binary_data": False}) if kind(client) is triton else ({},)
        for form, a in itertools.product(forms, (A, A + 1)):
            shm.set_shared_memory_region(handle, [a])  # other numbers by the same request
            other = kind(client).InferInput("b", [2, 4], "FP32")
            other.set_data_from_numpy(B, **form)
            reply = client.infer("add", [in_memory(client, "a", a, region), other])
            assert np.array_equal(reply.as_numpy("sum"), a + B)


def test_strings(client: Any) -> None:
    words = np.array([["a", "bc"], ["", "d"]], dtype=object)
    packed = serialize_byte_tensor(words)
    size = len(packed.item())
    with memory(client, 100) as (region, handle):
        shm.set_shared_memory_region(handle, [packed])
        wanted = kind(client).InferRequestedOutput("y")
        wanted.set_shared_memory(region, 100 - size, offset=size)
        client.infer("text", [in_memory(client, "x", words, region, size=size)], outputs=[wanted])
        assert shm.get_contents_as_numpy(handle, np.object_, [2, 2], size).tolist() == [[b"a", b"bc"], [b"", b"d"]]


def test_status_shows_what_is_registered_and_no_more(client: Any) -> None:
    assert status(client) == []
    with memory(client, 64) as (one, _), memory(client, 32) as (other, _):
        assert sorted(status(client)) == sorted(
            (name, f"{KEY}-{name}", 0, size) for name, size in ((one, 64), (other, 32))
        )
        assert status(client, other) == [(other, f"{KEY}-{other}", 0, 32)]
        client.unregister_system_shared_memory()
        assert status(client) == []
    with pytest.raises(InferenceServerException, match="Unable to find system shared memory region: 'nobody'"):
        client.get_system_shared_memory_status("nobody")


def test_mistakes_are_said_and_harm_nobody(client: Any) -> None:
    with memory(client, A.nbytes) as (region, handle):
        shm.set_shared_memory_region(handle, [A])
        good = [in_memory(client, "a", A, region), in_memory(client, "b", A, region)]
        small = kind(client).InferRequestedOutput("sum")
        small.set_shared_memory(region, 8)
        mistakes: list[tuple[str, list[Any], list[Any] | None]] = [
            ("Unable to find shared memory region: 'x'", [in_memory(client, "a", A, "x"), good[1]], None),
            ("Invalid offset", [in_memory(client, "a", A, region, offset=4), good[1]], None),
            ("input byte size mismatch", [in_memory(client, "a", A, region, size=8), good[1]], None),
            ("should be at least 32 bytes to hold the results", good, [small]),
        ]
        for words, inputs, outputs in mistakes:
            with pytest.raises(InferenceServerException, match=words):
                client.infer("add", inputs, outputs=outputs)
        with pytest.raises(InferenceServerException, match="already in manager"):
            client.register_system_shared_memory(region, f"{KEY}-{region}", 8)
        with pytest.raises(InferenceServerException, match="Unable to open shared memory region: '/nokey'"):
            client.register_system_shared_memory("new", "/nokey", 8)
        assert np.array_equal(client.infer("add", good).as_numpy("sum"), A + A)


def test_gpu_memory_is_refused_as_without_a_gpu(client: Any) -> None:
    client.get_cuda_shared_memory_status()
    client.unregister_cuda_shared_memory()
    with pytest.raises(InferenceServerException, match="'g', GPUs not supported"):
        client.register_cuda_shared_memory("g", b"aGFuZGxl", 0, 8)


def test_it_is_off_unless_allowed(stack: Stack) -> None:
    with triton.InferenceServerClient(stack.url.removeprefix("http://")) as client:
        with pytest.raises(InferenceServerException, match="Client shared memory is disabled"):
            client.register_system_shared_memory("r", f"{KEY}-off", 8, headers=dict(stack.headers))
        assert client.get_system_shared_memory_status(headers=dict(stack.headers)) == []
    register = f"{stack.url}/v2/systemsharedmemory/region/r/register"
    assert httpx2.post(register, json={"key": "/x", "byte_size": 8}, headers=stack.headers).status_code == 501
    assert httpx2.post(register, json={"byte_size": 8}, headers=stack.headers).status_code == 400


def test_classes_in_both_forms(client: Any) -> None:
    over_http = kind(client) is triton
    a, b = kind(client).InferInput("a", [2, 4], "FP32"), kind(client).InferInput("b", [2, 4], "FP32")
    a.set_data_from_numpy(A)
    b.set_data_from_numpy(np.zeros_like(B))
    best = [[b"3.000000:3", b"2.000000:2"], [b"7.000000:3", b"6.000000:2"]]
    for binary in (True, False) if over_http else (True,):
        form = {"binary_data": binary} if over_http else {}
        wanted = [
            kind(client).InferRequestedOutput("sum", class_count=2, **form),
            kind(client).InferRequestedOutput("difference", **form),
        ]
        for _ in range(2):
            reply = client.infer("add", [a, b], outputs=wanted, request_id="7")
            found = reply.as_numpy("sum")
            texts = [[text if binary else text.encode() for text in row] for row in found.tolist()]
            assert texts == best
            assert np.array_equal(reply.as_numpy("difference"), A)


def test_strings_have_no_classes(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="class result not available"):
        words = kind(client).InferInput("x", [1, 2], "BYTES")
        words.set_data_from_numpy(np.array([["a", "b"]], dtype=object))
        client.infer("text", [words], outputs=[kind(client).InferRequestedOutput("y", class_count=1)])


def test_a_region_that_is_registered_anew_is_the_new_memory_in_all_gateways(client: Any) -> None:
    name = f"region-{next(_serial)}"
    key = f"{KEY}-{name}"
    for factor in (1, 10, 100):
        array = np.ascontiguousarray(A * factor)
        handle = shm.create_shared_memory_region(name, key, A.nbytes)
        try:
            shm.set_shared_memory_region(handle, [array])
            client.register_system_shared_memory(name, key, A.nbytes)
            for _ in range(8):  # whichever gateway answers
                inputs = [in_memory(client, "a", array, name), in_memory(client, "b", array, name)]
                np.testing.assert_array_equal(client.infer("add", inputs).as_numpy("sum"), array + array)
        finally:
            client.unregister_system_shared_memory(name)
            shm.destroy_shared_memory_region(handle)


def test_booleans_of_any_byte_are_true_however_they_come(serving: Stack, client: Any, tmp_path: Path) -> None:
    if not any(model["name"] == "flags" for model in serving.http.get("/admin/v1/models").json()["models"]):
        serving.push("flags", models.identity(tmp_path / "m.onnx", datatype="BOOL", shape=("N", 4)))
    given = np.array([[0, 1, 2, 255], [128, 0, 3, 1]], np.uint8)
    wanted = given != 0
    with memory(client, given.nbytes) as (name, handle):
        shm.set_shared_memory_region(handle, [given])
        for way in ("shared memory", "raw"):
            tensor = kind(client).InferInput("x", [2, 4], "BOOL")
            if way == "raw":
                tensor.set_data_from_numpy(given.view(np.bool_))
            else:
                tensor.set_shared_memory(name, given.nbytes)
            answer = client.infer("flags", [tensor]).as_numpy("y")
            np.testing.assert_array_equal(answer.view(np.uint8), wanted.view(np.uint8))


def test_a_name_with_slashes_is_a_name(serving: Stack, client: Any) -> None:
    name, key = "a/b region/register", f"{KEY}-slashes"
    handle = shm.create_shared_memory_region("slashes", key, 8)
    try:
        client.register_system_shared_memory(name, key, 8)
        assert status(client, name) == [(name, key, 0, 8)]
        client.unregister_system_shared_memory(name)
        assert name not in [region[0] for region in status(client)]
    finally:
        shm.destroy_shared_memory_region(handle)
