"""`make explore`: prints the seed of each round, and how to repeat one that failed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MACHINE = """
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.kit.state_machines import machine_settings


class Machine(RuleBasedStateMachine):
    @rule(number=st.integers(0, 10**9))
    def takes(self, number):
        with open(FILE, "a") as file:
            file.write(f"{number}\\n")
        assert number < LIMIT


TestMachine = pytest.mark.state_machine(Machine.TestCase)
TestMachine.settings = machine_settings(max_examples=5, stateful_step_count=3)
"""


def explore(folder: Path, limit: int, *options: str) -> tuple[int, str, str]:
    """Exit status, output, and the numbers that the machine was given, of a machine that fails from `limit` on."""
    given = folder / "given"
    given.unlink(missing_ok=True)
    path = folder / "test_machine.py"
    path.write_text(f"FILE = {str(given)!r}\nLIMIT = {limit}\n{MACHINE}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.explore", *options, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout, given.read_text()


@pytest.mark.parametrize("ci", ["", "true"])
def test_rounds_have_seeds_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: str) -> None:
    monkeypatch.setenv("CI", ci)
    status, output, given = explore(tmp_path, 10**9 + 1, "--minutes", "0")
    assert status == 0
    assert re.fullmatch(r"seed \d+ passed in \d+ s\nrounds: 1, failures: 0\n", output)
    again = explore(tmp_path, 10**9 + 1, "--minutes", "0")
    assert again[2] != given


def test_a_failure_names_the_command_that_repeats_it(tmp_path: Path) -> None:
    status, output, given = explore(tmp_path, 0, "--minutes", "1")
    assert status == 1
    seed = re.search(r"seed (\d+) FAILED", output)
    assert seed is not None
    assert f"To repeat this round: make explore SEED={seed[1]} ARGS=" in output
    assert "AssertionError" in output or "assert " in output
    assert explore(tmp_path, 0, "--seed", seed[1])[::2] == (1, given)
