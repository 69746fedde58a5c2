"""PyTorch for the tests: in a folder of its own, beside the locked packages and after them in the path.

It is in no lock file: `torch` stands for gigabytes of CUDA in one index and for a CPU build in another. `make
test-tools` installs the CPU build; tests that need it are marked `needs("torch")`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(os.environ.get("TORCH_FOLDER", Path(__file__).parents[2] / ".venv" / "torch"))
VERSION = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def available() -> bool:
    """Return whether PyTorch can be imported here, after `add`."""
    return (FOLDER / "torch").is_dir() or find_spec("torch") is not None


def obtainable() -> bool:
    """Return whether this machine's index may have a CPU build; False if `install` found none."""
    return available() or not _none_found().exists()


def _none_found() -> Path:
    """Return the file that says that there was no CPU build."""
    return FOLDER.with_name(f"{FOLDER.name}-none")


def add() -> None:
    """Make `import torch` work in this process."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


def environment() -> dict[str, str]:
    """Return the environment in which a process can import torch."""
    return {"PYTHONPATH": str(FOLDER)} if FOLDER.is_dir() else {}


def install() -> str | None:
    """Install the CPU build. Returns the reason if that failed, else None.

    Where no index has one, as for a platform without wheels, its tests are left out, also by CI.
    """
    if available():
        return None
    _none_found().unlink(missing_ok=True)
    quiet = ["--disable-pip-version-check", "--no-input", "--quiet", "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "install", *quiet, "--target", str(FOLDER), f"torch=={VERSION}+cpu"]
    said = ""
    for index in ([], ["--extra-index-url", CPU_INDEX]):  # the first may have it, and the second may be out of reach
        done = subprocess.run([*command, *index], check=False, capture_output=True, text=True)
        if not done.returncode:
            return None
        said = said or done.stderr.strip()[-500:]
    if "No matching distribution found" in said:
        FOLDER.parent.mkdir(exist_ok=True)
        _none_found().write_text(said)
        print(f"There is no CPU build of torch {VERSION} here; its tests are left out.", file=sys.stderr)
        return None
    return f"pip could not install torch {VERSION} for the CPU: {said}"
