"""The corpus of the fuzzer, as tests: what was found once, and what every form of a request looks like."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.engines import run_hypothesis
from tests.fuzz.targets import TARGETS, seeds

CASES = [(target, path) for target in TARGETS for path in seeds(target)]


@pytest.mark.parametrize(("target", "path"), CASES, ids=[f"{target}-{path.name}" for target, path in CASES])
def test_each_input_is_answered_or_cleanly_refused(target: str, path: Path) -> None:
    TARGETS[target](path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_and_so_is_each_of_them_damaged(target: str) -> None:
    for path in seeds(target):
        content = path.read_bytes()
        chance = random.Random(path.name)
        for _ in range(10):
            damaged = bytearray(content)
            for _ in range(chance.randint(1, 3)):
                at = chance.randrange(len(damaged) + 1)
                damaged[at : at + chance.randint(0, 3)] = chance.randbytes(chance.randint(0, 2))
            TARGETS[target](bytes(damaged))


def test_it_can_be_fuzzed_without_atheris(tmp_path: Path) -> None:
    run_hypothesis("packed", 1, tmp_path)
    assert list(tmp_path.iterdir()) == []
