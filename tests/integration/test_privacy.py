"""What others on the machine, and the processes that run models, may not see: files of a home, and the admin key."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from millstream.services.environment import child_environment
from millstream.services.supervisor.start_checks import make_home
from tests.kit.models import mlp
from tests.kit.stack import ROOT, running_stack

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def test_a_home_is_its_owners_alone_and_workers_have_no_key(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        with running_stack(tmp_path, settings={"admin_key": "secret-of-the-operator"}) as stack:
            stack.push("m", mlp(tmp_path / "m.onnx"))
            assert not [path for path, mode in modes(tmp_path / "home") if mode & _OTHERS and not stat.S_ISLNK(mode)]
            pids = stack.pids()
            seen = {name: Path(f"/proc/{pid}/environ").read_bytes() for name, pid in pids.items()}
            assert b"secret-of-the-operator" in seen["gateway-0"]
            assert {name for name, environment in seen.items() if b"secret-of-the-operator" in environment} == {
                "gateway-0"
            }
    finally:
        os.umask(before)


def modes(home: Path) -> Iterator[tuple[Path, int]]:
    """Yield the files and folders of a home, with their modes, as far as they are still there."""
    for folder, _, files in os.walk(home):
        for path in (Path(folder), *(Path(folder, name) for name in files)):
            with suppress(FileNotFoundError):
                yield path, path.lstat().st_mode


def test_a_home_of_before_is_closed_to_others(tmp_path: Path) -> None:
    home = tmp_path / "home"
    make_home(home)
    for folder in (home, home / "logs", home / "repository"):
        folder.chmod(0o755)
    make_home(home)
    assert {path.stat().st_mode & _OTHERS for path in (home, home / "logs", home / "run", home / "repository")} == {0}


def test_a_folder_with_other_things_in_it_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    tmp_path.chmod(0o755)
    make_home(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert (tmp_path / "repository").stat().st_mode & _OTHERS == 0


@pytest.mark.parametrize(
    "command", [["-m", "millstream.gateway"], ["-m", "millstream.workers"], ["-m", "millstream.services.cli", "up"]]
)
def test_an_empty_key_is_refused_at_start(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=child_environment({"MILLSTREAM_HOME": str(tmp_path / "home"), "MILLSTREAM_ADMIN_KEY": ""}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == (2 if "up" in command else 1)
    assert "MILLSTREAM_ADMIN_KEY: the admin key is empty" in done.stderr
    assert "Traceback" not in done.stderr
