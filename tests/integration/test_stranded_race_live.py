"""A race on a device that no worker of a running server has: its status says so, and then it fails."""

from __future__ import annotations

from pathlib import Path

from millstream.plugins.compile.stored.races import new_race
from millstream.services.repository.folder import FolderRepository
from tests.kit import models
from tests.kit.command_line import Millstream
from tests.kit.stack import running_stack
from tests.kit.wait import wait_until

WAIT_S = 5


def test_a_race_without_a_device_says_so_and_fails(tmp_path: Path) -> None:
    with running_stack(tmp_path, controller=True, settings={"race_wait_s_max": WAIT_S}) as stack:
        stack.push("mlp", models.mlp(tmp_path / "mlp.onnx"))
        command = Millstream(stack.home)
        repository = FolderRepository(stack.home / "repository")
        race = new_race(repository.manifest("mlp", 1), "onnxruntime.cuda", "0" * 16, "cpu", 1.0)
        repository.races.change(race.key, lambda _: race)
        shown = command.json("race", "mlp", "--show")
        assert shown["state"] in {"queued", "failed"}
        assert "no worker of pool 'cpu'" in shown["why"]
        wait_until(lambda: command.json("race", "mlp", "--show")["state"] == "failed", what="it fails")
        assert f"came within {WAIT_S} s: start one" in command.json("race", "mlp", "--show")["why"]
