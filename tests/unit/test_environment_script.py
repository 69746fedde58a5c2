"""deploy/environment.sh, which `make` runs: what it installs and when. A small program stands in for Python and pip."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Makes .venv/bin/python a copy of itself, and notes what pip would install.
PYTHON = """#!/bin/sh
case "$*" in
    "-m venv --clear .venv") rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo clear >> calls ;;
    *" install "*) echo "${*##* install }" >> calls; if [ -e broken ]; then exit 1; fi ;;
    --version) echo Python 3.12.1 ;;
esac
"""
SERVING = "--require-hashes --only-binary :all: -r deploy/locks/serving.txt -r deploy/locks/build.txt"
DEV = "--require-hashes --only-binary :all: -r deploy/locks/dev.txt"
PROJECT = "--no-deps --no-build-isolation --editable ."


class Checkout:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("deploy/locks/serving.txt", "deploy/locks/build.txt", "deploy/locks/dev.txt", "pyproject.toml"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"{name}\n")
        (folder / "services").mkdir()
        (folder / "services/version.py").touch()
        (folder / "deploy/environment.sh").write_bytes((ROOT / "deploy/environment.sh").read_bytes())
        self.python = folder / "python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def start(self, kind: str) -> subprocess.Popen[str]:
        environment = {"PATH": os.environ["PATH"], "PYTHON": str(self.python)}
        return subprocess.Popen(
            ["sh", "deploy/environment.sh", kind],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, kind: str, status: int = 0) -> list[str]:
        """Run the script, and return what it did."""
        (self.folder / "calls").unlink(missing_ok=True)
        with self.start(kind) as process:
            output = process.communicate(timeout=60)[0]
        assert process.returncode == status, output
        return self.calls()

    def calls(self) -> list[str]:
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def change(self, name: str) -> None:
        path = self.folder / name
        path.write_text(path.read_text() + "changed\n")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_user_gets_what_serving_needs_and_a_developer_the_rest_once(checkout: Checkout) -> None:
    assert checkout.run("serving") == ["clear", SERVING, PROJECT]
    assert checkout.run("serving") == []
    assert checkout.run("dev") == [DEV]
    for kind in ("dev", "serving", "dev"):
        assert checkout.run(kind) == []


def test_a_developer_first(checkout: Checkout) -> None:
    assert checkout.run("dev") == ["clear", DEV, PROJECT]
    assert checkout.run("serving") == []


def test_only_content_counts(checkout: Checkout) -> None:
    checkout.run("dev")
    for path in checkout.folder.rglob("*.t*"):
        os.utime(path, (2**31, 2**31))
    assert checkout.run("dev") == []
    checkout.change("deploy/locks/dev.txt")
    assert checkout.run("serving") == []
    assert checkout.run("dev") == [DEV]
    checkout.change("deploy/locks/build.txt")
    assert checkout.run("serving") == [SERVING]
    checkout.change("services/version.py")
    assert checkout.run("serving") == [PROJECT]


def test_an_unfinished_environment_is_made_anew(checkout: Checkout) -> None:
    (checkout.folder / "broken").touch()
    assert checkout.run("serving", status=1) == ["clear", SERVING]
    (checkout.folder / "broken").unlink()
    assert checkout.run("serving") == ["clear", SERVING, PROJECT]


def test_two_at_once_install_once(checkout: Checkout) -> None:
    processes = [checkout.start("serving") for _ in range(4)]
    for process in processes:
        with process:
            process.communicate(timeout=60)
        assert process.returncode == 0
    assert checkout.calls() == ["clear", SERVING, PROJECT]


def test_without_a_usable_python_it_says_what_to_do(checkout: Checkout) -> None:
    checkout.python.write_text("#!/bin/sh\nexit 1\n")
    environment = {"PATH": "/nowhere", "PYTHON": str(checkout.python)}
    (checkout.folder / "bin").mkdir()
    for tool in ("sh", "cat", "cmp", "dirname", "mkdir"):
        found = next(path for folder in ("/bin", "/usr/bin") if (path := Path(folder, tool)).exists())
        (checkout.folder / "bin" / tool).symlink_to(found)
    environment["PATH"] = str(checkout.folder / "bin")
    done = subprocess.run(
        ["sh", "deploy/environment.sh", "serving"],
        cwd=checkout.folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Millstream needs Python 3.11 or newer, found: none." in done.stderr
    assert "make PYTHON=" in done.stderr
    assert not (checkout.folder / ".venv").exists()
