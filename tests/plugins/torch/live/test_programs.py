"""Programs of torch.export (.pt2): pushed, checked in the sandbox, served by workers of the torch backend."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.services.errors import Failure
from millstream.services.ingest.check_process import check_in_place
from millstream.services.settings import Settings
from tests.kit import odd_programs, torch_library, torch_models, v2
from tests.kit.command_line import Millstream
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until
from tests.kit.worker_process import running_worker

pytestmark = pytest.mark.needs("torch")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("programs")
    with running_stack(folder, pools="torch=1,backend=torch", environment=torch_library.environment()) as stack:
        yield stack


def upload(stack: Stack, name: str, content: bytes, config: Any = None) -> tuple[int, dict[str, Any]]:
    query = {"wait": "300"} | ({"config": json.dumps(config)} if config else {})
    reply = stack.http.post(f"/admin/v1/models/{name}/versions", params=query, content=content)
    return reply.status_code, reply.json()


def infer(stack: Stack, model: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    body, headers = v2.request(inputs)
    reply = stack.http.post(f"/v2/models/{model}/infer", content=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return v2.outputs(reply.content, dict(reply.headers))


def test_a_pushed_program_is_served(stack: Stack, tmp_path: Path) -> None:
    path = torch_models.sum_and_difference(tmp_path / "any-name")
    said = Millstream(stack.home).ok("push", "pair", path, "--config", '{"batching": true}')
    assert "ready" in said
    version = stack.http.get("/admin/v1/models/pair/versions/1").json()
    inputs = [(tensor["name"], tensor["datatype"], tensor["shape"]) for tensor in version["inputs"]]
    assert inputs == [(name, "FP32", [-1, 4]) for name in ("a", "b")]
    assert [one["name"] for one in version["outputs"]] == ["output_0", "output_1"]
    assert version["batching_decided"] in {"proven", "requested"}
    a, b = np.full((3, 4), 5, np.float32), np.full((3, 4), 2, np.float32)
    found = infer(stack, "pair", {"b": b, "a": a})
    assert found["output_0"].tolist() == [[7] * 4] * 3
    assert found["output_1"].tolist() == [[3] * 4] * 3


def test_rows_share_no_runs_unless_it_is_asked_for(stack: Stack, tmp_path: Path) -> None:
    content = torch_models.sum_and_difference(tmp_path / "m.pt2").read_bytes()
    status, version = upload(stack, "alone", content, {"batching": False})
    assert (status, version["batching"], version["batching_decided"]) == (201, False, "off")


def test_dangerous_programs_are_refused_and_leave_nothing(stack: Stack, tmp_path: Path) -> None:
    content = torch_models.sum_and_difference(tmp_path / "m.pt2").read_bytes()
    made = tmp_path / "made"
    for name, (change, refusal) in odd_programs.dangerous(str(made)).items():
        status, said = upload(stack, "bad", odd_programs.rewritten(content, change))
        assert status == 400, (name, said)
        assert refusal in said["error"], (name, said)
        assert "\n" not in said["error"]
        assert not made.exists(), name
    assert stack.http.get("/admin/v1/models/bad").status_code == 404
    assert not list((stack.home / "repository").glob("staging/*"))


def test_damaged_programs_are_refused(stack: Stack, tmp_path: Path) -> None:
    content = torch_models.sum_and_difference(tmp_path / "m.pt2").read_bytes()
    for name, (damaged, refusal) in odd_programs.damaged(content).items():
        status, said = upload(stack, "bad", damaged)
        assert status == 400, (name, said)
        assert refusal in said["error"], (name, said)
    for size in (100, len(content) // 2, len(content) - 1):
        status, said = upload(stack, "bad", content[:size])
        assert status == 400, said


def test_a_program_whose_first_dimension_is_fixed_runs_alone(stack: Stack, tmp_path: Path) -> None:
    content = torch_models.fixed(tmp_path / "m.pt2").read_bytes()
    status, version = upload(stack, "fixed", content)
    assert (status, version["batching"]) == (201, False)
    assert "fixed" in version["batching_reason"]
    assert version["inputs"][0]["shape"] == [1, 4]
    status, said = upload(stack, "fixed-batching", content, {"batching": True})
    assert status == 400
    assert said["error"].startswith("batching is not possible: the first dimension is fixed at 1")


def test_rows_that_influence_each_other_are_found(stack: Stack, tmp_path: Path) -> None:
    content = torch_models.mean_of_rows(tmp_path / "m.pt2").read_bytes()
    status, said = upload(stack, "mean", content, {"batching": True})
    assert status == 400
    assert "depends on the other rows" in said["error"]
    status, version = upload(stack, "mean", content)
    assert (status, version["batching"], version["batching_decided"]) == (201, False, "off")


def test_arguments_by_name_and_a_dictionary_as_result(stack: Stack, tmp_path: Path) -> None:
    content = torch_models.named(tmp_path / "m.pt2").read_bytes()
    status, version = upload(stack, "named", content)
    assert status == 201, version
    assert [one["name"] for one in version["inputs"]] == ["x", "scale"]
    assert [one["name"] for one in version["outputs"]] == ["scaled", "negated"]
    found = infer(stack, "named", {"x": np.ones((2, 3), np.float32), "scale": np.full((2, 1), 4, np.float32)})
    assert found["scaled"].tolist() == [[4] * 3] * 2
    assert found["negated"].tolist() == [[-1] * 3] * 2


def test_a_program_in_a_folder_of_triton_is_served_in_place(stack: Stack, tmp_path: Path) -> None:
    content = torch_models.sum_and_difference(tmp_path / "m.pt2").read_bytes()
    parameters = {
        "config": json.dumps({"backend": "pytorch", "max_batch_size": 8}),
        "file:1/model.pt2": base64.b64encode(content).decode(),
    }
    reply = stack.http.post("/v2/repository/models/folder/load", json={"parameters": parameters})
    assert reply.status_code == 200, reply.text
    assert stack.http.get("/v2/models/folder").json()["platform"] == "torch_export"
    assert stack.http.get("/v2/models/folder/config").json()["backend"] == "pytorch"
    ones = np.ones((2, 4), np.float32)
    assert infer(stack, "folder", {"a": ones, "b": ones})["output_0"].tolist() == [[2] * 4] * 2


def test_a_pool_that_loads_no_programs_is_named(stack: Stack, tmp_path: Path) -> None:
    content = torch_models.sum_and_difference(tmp_path / "m.pt2").read_bytes()
    with running_worker(stack, "other", "simulated"):
        wait_until(lambda: any(one["name"] == "other" for one in stack.http.get("/admin/v1/pools").json()["pools"]))
        status, said = upload(stack, "nowhere", content, {"pools": ["other"]})
    assert status == 400
    assert "no worker of pool other loads torch-export" in said["error"]


def test_a_gateway_without_pytorch_says_what_to_install(tmp_path: Path) -> None:
    """The check's process here has no PyTorch, unless it is in the locked environment."""
    torch_models.sum_and_difference(tmp_path / "m.pt2")
    with pytest.raises(Failure, match=r"install millstream\[torch\] where the gateway runs"):
        asyncio.run(check_in_place(tmp_path, "m.pt2", None, Settings()))
