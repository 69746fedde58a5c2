"""A model over 2 GiB, which no protobuf file can hold: its weights are a file beside it, from upload to answer."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.kit import v2
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

ROWS, COLUMNS = (1 << 21) + (1 << 12), 256
ROW_BYTES = 4 * COLUMNS
CHUNK_BYTES = 4 << 20
LAST = np.arange(COLUMNS, dtype=np.float32)  # the last row; all others are zeros


def archive() -> bytes:
    """Return a zip file of some megabytes: "i" INT64 [N] -> "y" FP32 [N, COLUMNS], rows of a table over 2 GiB."""
    table = TensorProto(
        name="table", data_type=TensorProto.FLOAT, dims=[ROWS, COLUMNS], data_location=TensorProto.EXTERNAL
    )
    for key, value in {"location": "weights.bin", "offset": 0, "length": ROWS * ROW_BYTES}.items():
        table.external_data.add(key=key, value=str(value))
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "i"], ["y"])],
        "large",
        [helper.make_tensor_value_info("i", TensorProto.INT64, ["N"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", COLUMNS])],
        [table],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        packed.writestr("model.onnx", model.SerializeToString())
        with packed.open("weights.bin", "w", force_zip64=True) as weights:
            zeros = bytes(CHUNK_BYTES)
            left = (ROWS - 1) * ROW_BYTES
            while left > 0:
                weights.write(zeros[:left])
                left -= CHUNK_BYTES
            weights.write(LAST.tobytes())
    return file.getvalue()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    try:
        with running_stack(tmp_path, settings={"worker_memory": "8GiB", "check_s_max": 600}) as stack:
            yield stack
    finally:
        rmtree(tmp_path / "home")  # pytest keeps the folders of its last runs


@pytest.mark.timeout(1500)
def test_it_is_checked_loaded_and_answers_and_its_race_says_what_memory_it_takes(stack: Stack) -> None:
    reply = stack.http.post("/admin/v1/models/large/versions", params={"wait": 600}, content=archive(), timeout=1300)
    assert reply.status_code == 201, reply.text
    assert reply.json()["size_bytes"] > ROWS * ROW_BYTES > 1 << 31
    assert (reply.json()["state"], reply.json()["batching_decided"]) == ("ready", "proven")
    body, headers = v2.request({"i": np.array([ROWS - 1, 0], np.int64)})
    answer = stack.http.post("/v2/models/large/infer", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    rows = v2.outputs(answer.content, dict(answer.headers))["y"]
    np.testing.assert_array_equal(rows, [LAST, np.zeros(COLUMNS)])
    path = "/admin/v1/models/large/versions/1/race"
    assert stack.http.post(path, json={"accept_random_samples": True}).status_code == 202
    wait_until(lambda: "it waits for memory" in stack.http.get(path).json()["why"], what="the race waits")
    assert stack.http.delete(path).json()["state"] == "cancelled"
