"""Kernels that have less than this one: a process, and what it starts, is refused calls as by an older one."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LANDLOCK = (444, 445, 446)
_UNSHARE = {"x86_64": 272, "aarch64": 97}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def without_landlock() -> None:
    """Have the kernel seem to have no Landlock, as before 5.13, in gVisor, and where it is not enabled."""
    _without(_LANDLOCK, errno.ENOSYS)


def without_namespaces() -> None:
    """Have the kernel refuse new namespaces, as in most containers."""
    _without((_UNSHARE[platform.machine()],), errno.EPERM)


def has_namespaces() -> bool:
    """Return whether a process gets namespaces here where it has no Landlock."""
    code = "from tests.kit.kernels import *; without_landlock(); from millstream.services.sandbox.confine import *; "
    code += "sys.exit(not confine((), ()).namespaces)"
    return (
        sys.platform == "linux" and subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    )


def _without(numbers: tuple[int, ...], error: int) -> None:
    def instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", operation, if_true, if_false, value)

    code = instruction(0x20, 0)
    for number in numbers:
        code += instruction(0x15, number, 0, 1) + instruction(0x06, 0x50000 | error)
    code += instruction(0x06, 0x7FFF0000)
    libc, program = ctypes.CDLL(None, use_errno=True), _Program(len(code) // 8, code)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "seccomp")
