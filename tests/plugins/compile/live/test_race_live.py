"""A whole race on a running stack: asked for by the command, run by a worker while it serves, its winner served."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit import models, v2
from tests.kit.command_line import Millstream
from tests.kit.load import constant_load
from tests.kit.races import raise_priorities
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

RACE = "/admin/v1/models/mlp/versions/1/race"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with running_stack(folder) as stack:
        stack.push("mlp", models.mlp(folder / "mlp.onnx"))
        yield stack


def test_a_race_reaches_a_verdict_while_the_version_serves(stack: Stack, tmp_path: Path) -> None:
    command = Millstream(stack.home)
    np.savez(tmp_path / "samples.npz", input=np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32))
    body = v2.request({"input": np.ones((2, 64), np.float32)})
    before = stack.http.post("/v2/models/mlp/infer", content=body[0], headers=body[1])
    expected = v2.outputs(before.content, before.headers)["output"]
    with constant_load(stack.port, "/v2/models/mlp/infer", [body], callers=1) as load:
        load.more(5)
        arguments = ["race", "mlp", "--samples", str(tmp_path / "samples.npz")]
        command.ok(*arguments, "--targets", "onnxruntime,openvino", "--no-wait", "--json")

        def over() -> bool:
            raise_priorities(stack)
            return stack.http.get(RACE).json()["state"] in {"decided", "failed", "cancelled"}

        wait_until(over, 400)
        found = json.loads(command.ok("race", "mlp", "--show", "--json"))
        load.more(5)
    for answer in load.answers:
        assert answer.status == 200, answer.body
        np.testing.assert_allclose(v2.outputs(answer.body, answer.headers)["output"], expected, rtol=1e-2, atol=1e-3)
    assert found["state"] == "decided", found
    assert {"baseline", "winner", "ratio", "rows"} <= found.keys()
    assert {row["target"] for row in found["rows"]} >= {"onnxruntime", "openvino"}
    assert found["report"]["samples"] == "uploaded"
    folder = stack.home / "repository" / "models" / "mlp" / "1" / "compiled"
    left = {path.name for path in folder.glob("race-*/*")}
    winners = {row["folder"] for row in found["rows"] if row["candidate"] in found["table"].values()}
    assert left == winners
    if found["winner"]:
        assert found["serving"]
        repeat_a_loser(stack, command, found)
        assert "times as fast" in command.ok("describe", "mlp")
        assert json.loads(command.ok("compile", "undo", "mlp", "--json"))["serving"] is False
    assert "ROW" in command.ok("race", "mlp", "--show")


def repeat_a_loser(stack: Stack, command: Millstream, before: dict[str, Any]) -> None:
    """Run the command that `--reproduce` prints for a row that lost: what serves takes part, and is not lost for it."""
    loser = next((row for row in before["rows"] if row["verdict"] == "lost"), None)
    if loser is None:
        return
    words = shlex.split(command.ok("race", "mlp", "--reproduce", loser["candidate"]))
    command.ok(*words[1:], "--no-wait", "--json")

    def over() -> bool:
        raise_priorities(stack)
        return stack.http.get(RACE).json()["state"] in {"decided", "failed", "cancelled"}

    wait_until(over, 400)
    after = json.loads(command.ok("race", "mlp", "--show", "--json"))
    assert after["state"] == "decided", after
    raced = {row["candidate"] for row in after["rows"]}
    assert {loser["candidate"], before["winner"]} <= raced
    assert all(row["cached"] for row in after["rows"] if row["candidate"] == before["winner"])
    assert json.loads(command.ok("race", "mlp", "--show", "--json"))["serving"] is bool(after["winner"])
