"""Creates virtual environments with the packages of some extras or of a lock file, and nothing else.

Packages are hard links to those of the tests' own environment: nothing is downloaded, and it takes seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: packages of a lock file that the tests' environment lacks -> substitute with the same module, for another device
STAND_INS = {"onnxruntime-gpu": "onnxruntime"}


def needed_by(*extras: str) -> set[str]:
    """Return the names of the packages that `pip install millstream[EXTRAS]` installs here, from pyproject.toml."""
    optional = PROJECT["optional-dependencies"]
    waiting = [Requirement(line) for line in PROJECT["dependencies"]]
    waiting += [Requirement(line) for extra in extras for line in optional[extra]]
    needed: set[str] = set()
    visited: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in visited:
            continue
        visited.add(str(requirement))
        name = canonicalize_name(requirement.name)
        if name == PROJECT["name"]:  # `all` names other extras
            waiting += [Requirement(line) for extra in requirement.extras for line in optional[extra]]
            continue
        needed.add(name)
        for line in _distribution(name).requires or ():
            inner = Requirement(line)
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in requirement.extras or {""}):
                inner.marker = None
                waiting.append(inner)
    return needed


def locked(lock: str) -> set[str]:
    """Return the names of the packages that deploy/locks/LOCK.txt installs on this machine and Python."""
    lines = (ROOT / f"deploy/locks/{lock}.txt").read_text().splitlines()
    requirements = [Requirement(line.rstrip("\\ ")) for line in lines if line and not line.startswith((" ", "#"))]
    return {
        canonicalize_name(requirement.name)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate()
    }


def make_environment(folder: Path, packages: set[str], *, compiled: bool = False) -> Path:
    """Create a virtual environment in `folder` with these packages, without pip; return its Python.

    Args:
        compiled: whether the packages come with their compiled code, as far as this environment has it.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin/python"
    site = next(folder.glob("lib/python*/site-packages"))
    for name in packages:
        found = _distribution(name)
        for entry in _entries(found):
            (site / entry).parent.mkdir(exist_ok=True)
            _link(Path(str(found.locate_file(entry))), site / entry, None if compiled else _CACHES)
    return python


def install(python: Path, wheel: Path) -> None:
    """Install a wheel, without its dependencies, into the environment of `python`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", str(python)]
    options = ["--no-deps", "--no-index", "--no-compile"]  # a test imports few of its modules
    subprocess.run([*command, "install", *options, str(wheel)], check=True, capture_output=True)


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout into `folder`."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def _distribution(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return distribution(STAND_INS[name])


_CACHES = shutil.ignore_patterns("__pycache__")


def _link(source: Path, target: Path, ignore: Callable[[str, list[str]], set[str]] | None) -> None:
    """Create hard links; symbolic ones would lead out of the folders that the sandbox of a check may read."""
    if source.is_dir():
        shutil.copytree(source, target, copy_function=_link_file, ignore=ignore, dirs_exist_ok=True)
    else:
        _link_file(str(source), str(target))


def _link_file(source: str, target: str) -> None:
    if Path(target).exists():  # distributions may share a folder, as those of OpenTelemetry do
        return
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _entries(found: Distribution) -> Iterator[str]:
    """Yield the files and folders of a distribution in site-packages: the topmost that it shares with no other."""
    files = [file for file in found.files or () if file.parts[0] not in ("..", "__pycache__")]
    packages = {file.parts[0] for file in files if len(file.parts) == 1 or file.parts[1] == "__init__.py"}
    metadata = {file.parts[0] for file in files if file.parts[0].endswith((".dist-info", ".data", ".libs"))}
    alone = packages | metadata
    yield from sorted({"/".join(file.parts[: 1 if file.parts[0] in alone else 2]) for file in files})
