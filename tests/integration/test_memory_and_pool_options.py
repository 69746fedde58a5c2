"""Bad input to `up --memory`, `up --pool` and `plan`: one line that says what to write, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.services.placement.pools import unknown_pool
from millstream.services.process.machine_share import check_memory
from tests.kit.command_line import Millstream

WRONG = [
    ("up --memory gpu=1GiB", "there is no pool gpu; the pools are cpu"),
    ("up --memory -1GiB", "write a size like 8GiB"),
    ("up --memory 10", "10 is too small for one worker, which needs 256MiB"),
    ("up --memory 1GiB --memory 2GiB", "the memory of every worker is given twice"),
    ("up --pool cpu=1,memory=1GiB --memory cpu=2GiB", "the memory of the pool cpu is given twice"),
    ("up --pool cpu=1,threds=2", "did you mean the option threads=2"),
    ("up --pool gpu=1,device_memory=1KB", "too small for one worker, which needs 64MiB"),
    ("up --pool cpu=0", "1 to 1024 workers"),
    ("plan --models -1", "between 1 and 100,000 models"),
    ("plan --models 99999999999999999999", "between 1 and 100,000 models"),
    ("plan --memory cpu=8GiB", "give one size, like 8GiB"),
    ("plan --memory -1GiB", "write a size like 8GiB or 500MB"),
]


@pytest.mark.parametrize(("command", "message"), WRONG)
def test_wrong_options_are_refused_with_what_to_write(tmp_path: Path, command: str, message: str) -> None:
    said = Millstream(tmp_path).fails(*command.split(), code=2)
    assert message in said
    assert said.startswith("--")


def test_more_memory_than_there_is_is_a_warning_in_units_that_people_read() -> None:
    said = check_memory("99999TiB", {"cpu": 2}, 24 << 30)
    assert "may use 204,797,952.0 GiB, and this machine or container has 24.0 GiB" in said


@pytest.mark.parametrize("command", ["configure", "placement", "plan", "up"])
def test_the_pages_teach_with_examples(tmp_path: Path, command: str) -> None:
    page = Millstream(tmp_path).ok(command, "--help")
    examples = page.partition("\nExamples:\n")[2].splitlines()
    assert len(examples) >= 3
    assert all(line.startswith(f"  millstream {command}") for line in examples)
    assert command != "up" or ("--memory 8GiB" in page and "--pool gpu=1,memory=16GiB" in page)


def test_an_unknown_pool_is_told_with_the_one_that_was_meant() -> None:
    assert "there is no pool 'gpus'; the pool is cpu" in unknown_pool("pools", "gpus", ["cpu"]).message
    said = unknown_pool("pools", "gpus", ["cpu", "gpu"]).message
    assert "there is no pool 'gpus' (did you mean 'gpu'?); the pools are cpu, gpu" in said
