"""Files that other programs read: the workflow, hooks of pre-commit, a development container, what `make test` runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from millstream.services.environment import child_environment

pytestmark = pytest.mark.plugins

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
WORKFLOW = ROOT / ".github/workflows/ci.yml"
CLASSIFIERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]


def accepted(*command: str | Path) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflow_follows_the_schema() -> None:
    accepted(BIN / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", WORKFLOW)


def test_workflow_runs_all_tests_at_night_and_those_of_each_part_on_a_change() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert {"push", "pull_request", "schedule"} <= workflow[True].keys()  # YAML 1.1 reads `on` as a truth value
    command = workflow["jobs"]["run"]["steps"][-1]["run"]
    assert re.fullmatch(r"\$\{\{ \(.*'schedule'.*\) && '\.ci/all' \|\| '\.ci/run' \}\}", command)
    for script in (ROOT / ".ci").iterdir():
        assert os.access(script, os.X_OK), script
        accepted("bash", "-n", script)


def test_workflow_runs_on_the_oldest_and_the_newest_python() -> None:
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["run"]
    supported = re.findall(r"Python :: (3\.\d+)'", str(CLASSIFIERS))
    oldest, newest = [run["python"] for run in job["strategy"]["matrix"]["include"]]
    assert re.fullmatch(re.escape(supported[0]) + r"\.\d+", oldest), "the patch that a distribution ships"
    assert newest == supported[-1]
    actions = [step["uses"] for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in actions)


def test_hooks_of_pre_commit_are_tools_of_the_environment() -> None:
    configuration = ROOT / ".pre-commit-config.yaml"
    accepted(BIN / "pre-commit", "validate-config", configuration)
    for repository in yaml.safe_load(configuration.read_text())["repos"]:
        assert repository["repo"] == "local"
        assert all(hook["language"] == "system" for hook in repository["hooks"])


def test_development_container_uses_a_pinned_image_and_targets_of_the_makefile() -> None:
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert re.fullmatch(r"python:3\.\d+\.\d+-bookworm@sha256:[0-9a-f]{64}", container["image"])
    targets = re.findall(r"make ([\w-]+)", container["postCreateCommand"])
    makefile = (ROOT / "Makefile").read_text()
    assert targets
    assert all(f"\n{target}: " in makefile for target in targets)


def test_files_that_tools_leave_behind_are_ignored() -> None:
    left = [".schemathesis/x", ".venv/x", "dist/x", "build/x", ".hypothesis/x", ".coverage", ".import_linter_cache/x"]
    done = subprocess.run(["git", "check-ignore", *left], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == left


def test_make_test_runs_files_that_exist_and_says_how_many_it_leaves_out() -> None:
    lines = (ROOT / "tests/essential.txt").read_text().split()
    ignored = [line.removeprefix("--ignore=") for line in lines if line.startswith("--ignore=")]
    listed = [line for line in lines if not line.startswith("--ignore=")]
    live = {
        str(path.relative_to(ROOT))
        for name in ("integration", "faults", "plugins/*/live", "plugins/*/e2e")
        for path in ROOT.glob(f"tests/{name}/test_*.py")
    }
    files = {line.partition("::")[0] for line in listed}  # some run one test of a file
    assert [path for path in (*files, *ignored) if not (ROOT / path).exists()] == []
    units = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/plugins/*/unit")}
    assert files - live == {"tests/fuzz", "tests/contract", "tests/property", "tests/unit"} | units
    # not as a part of the make that runs the tests
    environment = {name: value for name, value in child_environment({}).items() if not name.startswith("MAKE")}
    said = subprocess.check_output(["make", "--dry-run", "test", "ARGS="], cwd=ROOT, text=True, env=environment)
    assert f"the other {len(live - files)} files of {len(live)} " in said
