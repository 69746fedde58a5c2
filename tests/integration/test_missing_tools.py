"""`make test` and `make test-tools` on a machine with Python, make and coreutils alone: a PATH without anything
else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import tools
from tests.kit.stack import ROOT

COREUTILS = ("cat", "cmp", "env", "id", "mkdir", "mv", "nproc", "rm", "sleep", "sort", "touch", "true", "uname")
TWO_NEED_IT = "tests/unit/test_metrics.py -p no:cacheprovider -k 'promtool_is_content or catalogue_is_sound'"
LEFT_OUT = """left out: 2 tests"""
FUNCTION = "    tests/unit/test_metrics.py::test_promtool_is_content (2)"


class Machine:
    """`folder`: its whole PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.libraries = folder / "libraries"
        self.torch = folder / "torch-library"
        for path in (self.home, self.libraries, self.torch / "torch"):
            path.mkdir(parents=True)
        # The loader stops at a file of that name, and cannot load this one.
        (self.libraries / "libb64.so.0d").touch()
        for name in ("sh", "make", *COREUTILS):
            found = shutil.which(name)
            assert found is not None, name
            (folder / name).symlink_to(found)
        (folder / "python3").symlink_to(Path(sys.executable).resolve())

    def program(self, name: str, *lines: str) -> None:
        path = self.folder / name
        path.write_text("\n".join(["#!/bin/sh", "set -e", *lines, ""]))
        path.chmod(0o755)

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"HOME": str(self.home), "PATH": str(self.folder), "LD_LIBRARY_PATH": str(self.libraries)}
        environment["TORCH_FOLDER"] = str(self.torch)
        return subprocess.run(
            command,
            cwd=ROOT,
            env=environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )

    def make(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("make", "--no-print-directory", *arguments, **variables)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


@pytest.mark.parametrize("processes", ["0", "2"])
def test_tests_without_their_tool_are_left_out_and_named(machine: Machine, processes: str) -> None:
    done = machine.make("test", f"ARGS={TWO_NEED_IT} -n {processes}")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[0].startswith("Not here: ")
    for tool in (
        "chromium",
        "curl",
        "gcc",
        "h2load",
        "libb64.so.0d",
        "nginx",
        "openssl",
        "prometheus",
        "promtool",
        "setpriv",
    ):
        assert f" {tool}," in lines[0], lines[0]
    packages = "build-essential chromium curl libb64-0d nghttp2-client nginx openssl prometheus systemd util-linux"
    assert f"`make test-tools` installs them (apt-get install {packages})" in lines[0]
    end = lines[next(number for number, line in enumerate(lines) if LEFT_OUT in line) + 1 :]
    assert end[:2] == ["promtool is missing (make test-tools):", FUNCTION]
    assert "1 passed, 2 skipped" in lines[-1]


def test_ci_fails_where_something_would_be_left_out(machine: Machine) -> None:
    done = machine.make("test", f"ARGS={TWO_NEED_IT} -n 2", CI="true")
    assert done.returncode != 0
    assert "CI runs every test, and this one needs promtool" in done.stdout
    assert "1 passed, 2 errors" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("obtainable", [True, False])
def test_without_torch_exactly_its_tests_are_left_out_by_ci_only_if_it_cannot_be_had(
    machine: Machine, obtainable: bool
) -> None:
    shutil.rmtree(machine.torch)
    if not obtainable:
        machine.torch.with_name("torch-library-none").write_text("No matching distribution found")
    chosen = "tests/contract/test_backend.py -k 'missing_input and (torch or openvino)'"
    done = machine.make("test", f"ARGS={chosen}", CI="true")
    assert (done.returncode == 0) == (not obtainable), done.stdout
    if obtainable:
        assert "CI runs every test, and this one needs torch" in done.stdout
    else:
        assert "torch is missing" in done.stdout
        assert "1 passed, 1 skipped" in done.stdout.splitlines()[-1]


def test_all_tests_run_where_their_tool_is_there(machine: Machine) -> None:
    machine.program("promtool", "cat > /dev/null")
    done = machine.make("test", f"ARGS={TWO_NEED_IT}")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "promtool" not in lines[0]
    assert LEFT_OUT not in done.stdout
    assert "3 passed" in lines[-1]


def test_a_tool_that_nobody_knows_ends_the_run(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("import pytest\n\n@pytest.mark.needs('promtol')\ndef test_it(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", "pyproject.toml", str(test)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "::test_it needs 'promtol', which tests/kit/tools.py does not list" in done.stderr


def test_clients_that_are_not_installed_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "CLIENTS", tmp_path)
    names = ("clients", "kserve")
    assert [tool.name for tool in tools.missing(names)] == ["clients", "kserve"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert [tool.name for tool in tools.missing(names)] == ["kserve"]
    (tmp_path / "lib/python3.11/site-packages/kserve").mkdir(parents=True)
    assert tools.missing(names) == []


@pytest.mark.needs("libb64.so.0d")
def test_the_missing_tools_are_installed_with_apt(machine: Machine) -> None:
    """With sudo unless root asks, and only what is missing."""
    said = machine.folder / "said"
    machine.program("promtool", "true")
    machine.program("prometheus", "true")
    machine.program("sudo", f'echo sudo >> {said}; exec "$@"')
    machine.program(
        "apt-get",
        f'echo "$@" >> {said}',
        'if [ "$1" = install ]; then for name in chromium curl gcc h2load nginx openssl setpriv systemd-analyze; do '
        f"ln -s /bin/true {machine.folder}/$name; done;",
        f"rm {machine.libraries}/libb64.so.0d; fi",
    )
    (machine.folder / "ln").symlink_to(shutil.which("ln") or "")
    done = machine.make("test-tools")
    assert done.returncode == 0, done.stdout + done.stderr
    asked = [line for line in said.read_text().splitlines() if line != "sudo"]
    packages = "build-essential chromium curl libb64-0d nghttp2-client nginx openssl systemd util-linux"
    assert asked == ["update -qq", f"install -y -qq --no-install-recommends {packages}"]
    assert said.read_text().count("sudo\n") == (2 if os.geteuid() else 0)
    said.unlink()
    machine.make("test-tools")
    assert not said.exists()


def test_what_cannot_be_installed_is_said_in_one_line(machine: Machine) -> None:
    done = machine.make("test-tools")
    assert done.returncode != 0
    said = done.stderr.splitlines()[0]
    assert "there is no apt-get here; install these packages, or what they are called here: build-essential" in said
    machine.program("sudo", 'exec "$@"')
    machine.program("apt-get", "exit 100")
    done = machine.make("test-tools")
    assert done.returncode != 0
    assert "`apt-get update -qq` failed" in done.stderr
