"""What instances take is measured in a real worker, published and kept, and unloading gives it back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit import models, v2
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

MB = 10**6
WEIGHTS_BYTES = 40 * MB
LOADS_FIRST, LOADS = 3, 12


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("memory")
    steady = models.scale(folder / "steady.onnx")
    with running_stack(folder, settings={"worker_memory": "1GiB"}, models={"steady": steady}) as stack:
        stack.push("heavy", models.heavy(folder / "heavy.onnx", WEIGHTS_BYTES))
        stack.push("other", models.heavy(folder / "other.onnx", WEIGHTS_BYTES // 2))
        yield stack


def instances(stack: Stack, model: str) -> list[dict[str, Any]]:
    [version] = stack.http.get(f"/admin/v1/models/{model}").json()["versions"]
    found: list[dict[str, Any]] = version["instances"]
    return found


def change(stack: Stack, model: str, to: str) -> None:
    assert stack.http.post(f"/v2/repository/models/{model}/{to}").status_code == 200
    wait_until(lambda: bool(instances(stack, model)) == (to == "load"), what=f"the {to} of {model}")


def resident_bytes(stack: Stack) -> int:
    return int(Path(f"/proc/{stack.pids()['cpu-0']}/statm").read_text().split()[1]) * 4096


def test_measured_bytes_are_published_and_kept(stack: Stack) -> None:
    [instance] = instances(stack, "heavy")
    assert WEIGHTS_BYTES <= instance["size_bytes"] < 2 * WEIGHTS_BYTES
    footprints = stack.home / "repository" / "footprints" / "heavy"
    [path] = wait_until(lambda: list(footprints.glob("*.json")), what="it is stored, after it is published")
    kept = json.loads(path.read_bytes())["onnxruntime.cpu"]
    assert kept["resident_bytes"] == instance["size_bytes"]
    assert kept["measured"]
    assert kept["load_s"] > 0
    used = "millstream_worker_memory_used_bytes"
    wait_until(lambda: stack.metrics().value(used) > 1.5 * WEIGHTS_BYTES, what="both models count")
    page = stack.metrics()
    assert page.value(used) < page.value("millstream_worker_memory_budget_bytes") == 1 << 30


def test_models_loaded_and_unloaded_in_turn_leave_no_memory_behind(stack: Stack) -> None:
    for model in ("heavy", "other"):
        change(stack, model, "unload")
    row, headers = v2.request({"x": np.ones((1, 2), np.float32)})
    before = 0
    for number in range(LOADS_FIRST + LOADS):
        model = ("heavy", "other")[number % 2]
        change(stack, model, "load")
        assert stack.http.post("/v2/models/steady/infer", content=row, headers=headers).status_code == 200
        change(stack, model, "unload")
        if number + 1 == LOADS_FIRST:
            before = resident_bytes(stack)
    after = wait_until(lambda: (now := resident_bytes(stack)) <= 1.1 * before and now, what="the memory is back")
    assert after
