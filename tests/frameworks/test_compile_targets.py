"""The contract of compile targets for those that need more than the ordinary environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.plugins.compile.form_runner import compile_candidate
from millstream.plugins.compile.targets import TARGETS, get_target
from millstream.plugins.compile.targets.base import Target
from tests.kit.compile_targets import check_compiles, check_fails, compiled, samples, subject, task
from tests.plugins.compile.unit.test_compile_target import HERE as ORDINARY

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]  # each compiles up to four times, for 240 s at most
NAMES = ("openvino-int8", "openvino-int8-dynamic", "iree", "tvm")
each = pytest.mark.parametrize("target", [get_target(name) for name in NAMES], ids=lambda target: target.name)


def test_every_target_that_this_machine_can_use_is_tested() -> None:
    usable = {target.name for target in TARGETS if target.available("cpu") is None}
    assert usable >= {*NAMES}
    assert ORDINARY


@each
def test_it_compiles_to_something_that_answers_as_the_version_does(target: Target, tmp_path: Path) -> None:
    check_compiles(target, tmp_path)


@each
def test_a_compilation_that_needs_more_memory_than_it_may_use_is_an_error(target: Target, tmp_path: Path) -> None:
    check_fails(target, tmp_path, memory_bytes=32 << 20)


@each
def test_a_compilation_that_writes_more_than_it_may_is_an_error(target: Target, tmp_path: Path) -> None:
    check_fails(target, tmp_path, written_bytes=500)


@each
def test_a_compilation_that_takes_too_long_is_ended(target: Target, tmp_path: Path) -> None:
    assert check_fails(target, tmp_path, seconds_max=0.05) == "it took longer than 0.05 s"


def test_accuracy_control_reports_how_it_quantized(tmp_path: Path) -> None:
    of, given, target = subject(tmp_path), samples(tmp_path / "samples.npz"), get_target("openvino-int8")
    candidate = next(one for one in target.candidates(of) if one.flags["accuracy_control"])
    found = compiled(compile_candidate(task(of, candidate, tmp_path / "out", given)))
    assert "quantized as a model without attention" in found.notes[0]
