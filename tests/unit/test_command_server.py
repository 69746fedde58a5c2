"""The test kit's commands in forks: the same output and exit code as those in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import command_server

LIMIT_S = 60.0


@pytest.mark.parametrize(
    ("module", "arguments", "stdin"),
    [
        ("json.tool", ["--sort-keys"], '{"b": 1, "a": 2}'),
        ("json.tool", ["file.json"], ""),
        ("json.tool", [], "no JSON"),
        ("json.tool", ["--unknown"], ""),
        ("site", ["--user-base"], ""),
    ],
    ids=["input", "folder", "failure", "usage", "environment"],
)
def test_a_fork_answers_as_a_process_of_its_own(tmp_path: Path, module: str, arguments: list[str], stdin: str) -> None:
    (tmp_path / "file.json").write_text("[1]")
    environment = {"PYTHONUSERBASE": str(tmp_path), "COLUMNS": "80"}
    expected = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=tmp_path,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    found = command_server.run(module, arguments, cwd=tmp_path, env=environment, stdin=stdin, timeout_s=LIMIT_S)
    assert (found.returncode, found.stdout, found.stderr) == (
        expected.returncode,
        expected.stdout,
        expected.stderr,
    )


def test_a_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        command_server.run("http.server", ["0", "-b", "127.0.0.1"], cwd=tmp_path, env={}, stdin="", timeout_s=0.5)
