"""The memory of a compilation counts in the worker's account, and a load that needs it ends the compilation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import pytest

from millstream.services.model.manifest import Manifest, SourceFile
from millstream.services.placement.views import Footprint
from millstream.workers.models.load_version import COMPILE_BYTES_MIN, LoadEnvironment, LoadTask
from millstream.workers.models.memory_budget import MemoryBudget
from millstream.workers.variants.compiles import MEMORY_FIXED_BYTES, MEMORY_RATIO, VariantCompiles
from tests.contract.repositories import manifest
from tests.kit.wait import wait_until

BASE = 100 << 20
NEEDED = MEMORY_FIXED_BYTES + MEMORY_RATIO * COMPILE_BYTES_MIN


class Backend:
    def target(self, device: str) -> Any:
        return type("Target", (), {"name": device})


class Variants:
    """Nothing is compiled yet."""

    def report(self, one: Manifest, target: Any) -> None:
        return None


def large() -> Manifest:
    file = SourceFile(path="source/model.onnx", size_bytes=COMPILE_BYTES_MIN, sha256="0" * 64)
    return manifest().model_copy(update={"files": (file,)})


def compiles(budget: MemoryBudget) -> VariantCompiles:
    at = LoadEnvironment(cast("Any", Backend()), "onnxruntime", "cpu", 1, budget)
    return VariantCompiles(at, cast("Any", Variants()))


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the process that compiles by one that writes down its task and never ends."""
    program, said = tmp_path / "program", tmp_path / "task"
    program.write_text(f"#!/bin/sh\ncat > {said}.new && mv {said}.new {said}\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return said


def test_a_compilation_counts_and_gives_way_to_a_load(endless: Path) -> None:
    budget = MemoryBudget(BASE + NEEDED, lambda: BASE)
    compiling = compiles(budget)
    assert not compiling.memory.give_way(), "there is none"
    compiling.want(large())
    wait_until(endless.exists, what="it runs")
    assert budget.used_bytes == BASE + NEEDED
    assert LoadTask.model_validate_json(endless.read_bytes()).memory_bytes == NEEDED, "its process has a limit"
    assert not budget.reserve("load", Footprint(1))
    assert compiling.memory.give_way()
    assert budget.used_bytes == BASE
    assert budget.reserve("load", Footprint(1))
    assert not compiling.memory.give_way()


def test_a_compilation_without_memory_does_not_begin(endless: Path) -> None:
    budget = MemoryBudget(BASE + NEEDED - 1, lambda: BASE)
    compiling = compiles(budget)
    compiling._compile(large())
    assert not endless.exists()
    assert budget.used_bytes == BASE


def test_without_a_limit_it_has_none(endless: Path) -> None:
    compiling = compiles(MemoryBudget(0, lambda: BASE))
    compiling.want(large())
    wait_until(endless.exists, what="it runs")
    assert LoadTask.model_validate_json(endless.read_bytes()).memory_bytes == 0
    assert compiling.memory.give_way()
    compiling.stop()
