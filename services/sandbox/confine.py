"""The sandbox of a process that reads what strangers sent: files by Landlock, calls by seccomp, no privileges of root.

confine(reads, writes) ─> capabilities dropped ─> Landlock ─> seccomp ─> Layers that are in force
Each layer is used where the kernel has it; `millstream doctor` says what is missing.
"""

from __future__ import annotations

import ctypes
import json
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from millstream.services.sandbox import landlock, seccomp

_PR_SET_NO_NEW_PRIVS = 38
_CAPSET: dict[str, int] = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
#: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root in a container may own none of the files; Landlock bounds them
_KEPT_CAPABILITIES = 0b110
_PACKAGE = Path(__file__).parents[2]  # in a checkout it holds links to the folders: a rule follows none
_SERVICES = Path(__file__).resolve().parents[1]
_SYSTEM = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store", "/etc/ld.so.cache",
    "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu",
    "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random",
)  # fmt: skip


class Layers(NamedTuple):
    """What is in force. `landlock`: the ABI of the kernel; 0: none."""

    landlock: int
    seccomp: bool


def confine(reads: Iterable[Path], writes: Iterable[Path]) -> Layers:
    """Leave this process the libraries and `reads` to read and `writes` to change; no network, program or process.

    For the main thread of a process that has no other. Raises OSError.
    """
    if not sys.platform.startswith("linux"):
        return Layers(0, False)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    _drop_capabilities(libc)
    reads, writes = [*reads], [*writes]
    abi = landlock.restrict([*_library_paths([*reads, *writes]), *reads], [*writes, Path("/dev/null")])
    return Layers(abi, seccomp.install())


def _library_paths(granted: Sequence[Path]) -> list[Path]:
    """What Python, its packages and the native libraries are read from. `granted`: what the process is to work on."""
    paths = sysconfig.get_paths()
    places = [Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    places += [Path(prefix) / "lib" for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    # A folder with the models in it is no library.
    imported = [Path(entry) for entry in sys.path if entry]
    places += [place for place in imported if not any(path.is_relative_to(place) for path in granted)]
    return [*dict.fromkeys(place for place in places if place.is_absolute()), _PACKAGE, _SERVICES, *map(Path, _SYSTEM)]


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Keep those of the files alone. Without privileges, or on machines not known here, nothing changes."""
    number = _CAPSET.get(platform.machine())
    if number is None:
        return
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    kept = _KEPT_CAPABILITIES & _permitted()
    sets = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)  # effective, permitted, inheritable; lower and upper halves
    libc.syscall(number, ctypes.byref(header), ctypes.byref(sets))


def _permitted() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapPrm:")), 0)


def probe() -> Layers:
    """The layers that a new process of this installation gets, found out in one. Raises OSError."""
    done = subprocess.run(
        [sys.executable, "-m", "millstream.services.sandbox.confine"],
        cwd=_PACKAGE.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=30,
    )
    if done.returncode:
        raise OSError(done.returncode, done.stderr.decode(errors="replace").strip()[-300:])
    return Layers(*json.loads(done.stdout))


if __name__ == "__main__":
    print(json.dumps(confine((), ())))
