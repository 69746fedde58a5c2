"""Landlock: a process gives up access to files, TCP and other processes, except for the paths it lists. Linux >= 5.13.

Source: Documentation/userspace-api/landlock.rst and include/uapi/linux/landlock.h of the Linux kernel.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from millstream.services.process.c_library import c_library

# The numbers of these system calls are the same on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_DIR, _MAKE_REG, _MAKE_SYM = 1 << 7, 1 << 8, 1 << 12
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
#: file rights by the first ABI that supports them: a handled right is denied unless a rule allows it
_HANDLED_FILES = {1: (1 << 13) - 1, 2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEV}
_HANDLED_TCP, _BIND = 0b11, 0b01  # bind, connect
_HANDLED_SCOPES = 0b11  # abstract unix sockets, signals
_TCP_ABI, _SCOPES_ABI = 4, 6

_READ = _READ_FILE | _READ_DIR
# Excludes execution and the creation of links, devices, sockets and FIFOs.
_WRITE = _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _REFER | _TRUNCATE
_DEVICE = _READ | _WRITE_FILE | _IOCTL_DEV
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _layout_ = "ms"  # Python 3.14 requires it with _pack_; the fields are laid out as in C's packed structure
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi() -> int:
    """Return the kernel's Landlock ABI version; 0 if it has none or this process may not use it."""
    if not sys.platform.startswith("linux"):
        return 0
    version: int = c_library().syscall(_CREATE_RULESET, None, 0, _GET_VERSION)
    return max(0, version)


def restrict(
    reads: Iterable[Path],
    writes: Iterable[Path],
    programs: Iterable[Path] = (),
    devices: Iterable[Path] = (),
    *,
    installs: bool = False,
    network: bool = False,
) -> int:
    """Restrict this thread, and the threads and processes it starts, to reading `reads` and changing `writes`.

    `programs` may be executed. A program's own interpreter (ld.so) must be among them. `devices` may be controlled.
    `installs`: it may connect to other machines, and make symbolic links. `network`: the first of these.

    Paths that do not exist are skipped. The process must have set no_new_privs. Returns the active ABI version; 0 if
    the kernel has no Landlock and nothing changed. Raises OSError.
    """
    version = abi()
    if not version:
        return 0
    handled = sum(rights for since, rights in _HANDLED_FILES.items() if since <= version)
    ruleset = _create(version, handled, 0 if installs else _BIND if network else _HANDLED_TCP)
    written = _WRITE | _MAKE_SYM if installs else _WRITE
    try:
        for paths, rights in ((reads, _READ), (writes, written), (programs, _READ | _EXECUTE), (devices, _DEVICE)):
            for path in paths:
                _allow(ruleset, path, rights & handled)
        if c_library().syscall(_RESTRICT_SELF, ruleset, 0):
            raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    finally:
        os.close(ruleset)
    return version


def _create(version: int, handled: int, tcp: int) -> int:
    attributes = _Ruleset(
        handled,
        tcp if version >= _TCP_ABI else 0,
        _HANDLED_SCOPES if version >= _SCOPES_ABI else 0,
    )
    size = 8 if version < _TCP_ABI else 16 if version < _SCOPES_ABI else 24
    ruleset: int = c_library().syscall(_CREATE_RULESET, ctypes.byref(attributes), size, 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    return ruleset


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_A_FILE
        rule = _PathBeneath(rights, descriptor)
        if c_library().syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0):
            raise OSError(ctypes.get_errno(), "landlock_add_rule")
    finally:
        os.close(descriptor)
