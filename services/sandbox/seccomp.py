"""A process gives up all system calls but those that computing on its own files and memory needs.

A filter in classic BPF: calls of `calls` ─> allowed, some by their arguments; all others ─> EPERM; those that came with
Linux 5.1 and later ─> ENOSYS, since C libraries then use an older call. Linux on x86-64 and 64-bit ARM.
Source: Documentation/userspace-api/seccomp_filter.rst, include/uapi/linux/{seccomp,filter,audit}.h
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from typing import NamedTuple

from millstream.services.process.c_library import c_library
from millstream.services.sandbox import calls

_PR_GET_SECCOMP, _PR_SET_SECCOMP, _MODE_FILTER = 21, 22, 2
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
#: offsets in struct seccomp_data; those of arguments are their lower halves on little-endian machines
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, (16, 24, 32, 40)
#: from this number on x86-64 has a second table of the same calls (x32)
_X32 = 0x40000000
#: the first call of Linux 5.1
_NEW = 424
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
_CLONE_FILES, _CLONE_THREAD, _CLONE_NAMESPACES = 0x00000400, 0x00010000, 0x7E020080

#: calls that start processes and programs, and wait for them, for compilers; which programs, Landlock limits
_STARTS = frozenset({"clone", "fork", "vfork", "execve", "pidfd_open"})
#: allowed if their first argument is this process
_OWN_PROCESS = frozenset({"kill", "tkill", "tgkill"})
#: the same, or 0, which is this process, too
_OWN_OR_NONE = frozenset({"prlimit64", "sched_setaffinity"})
#: name -> which argument, what it may be, and the error otherwise
_CHOICES: dict[str, tuple[int, frozenset[int], int]] = {
    # PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_READ, PR_GET_TIMERSLACK, PR_SET_NO_NEW_PRIVS,
    # PR_GET_NO_NEW_PRIVS, PR_GET_THP_DISABLE, PR_SVE_GET_VL, PR_SET_VMA; not PR_SET_PDEATHSIG
    "prctl": (0, frozenset({3, 15, 16, 23, 30, 38, 39, 42, 51, 0x53564D41}), errno.EPERM),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; not FIOASYNC and FIOSETOWN, which send signals
    "ioctl": (1, frozenset({0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451}), errno.ENOTTY),
    # F_DUPFD to F_SETLKW, locks of open files, F_DUPFD_CLOEXEC, F_GETPIPE_SZ; not F_SETOWN, which sends signals
    "fcntl": (1, frozenset({*range(8), 36, 37, 38, 1030, 1032}), errno.EPERM),
    # CLOSE_RANGE_CLOEXEC; not CLOSE_RANGE_UNSHARE: a thread's own files would not be seen (`folder_watch`)
    "close_range": (2, frozenset({0, 4}), errno.EPERM),
}


class _Machine(NamedTuple):
    """An architecture: the kernel's AUDIT_ARCH_… constant, and the numbers of allowed calls by name."""

    audit: int
    calls: dict[str, int]


_MACHINES = {
    "x86_64": _Machine(0xC000003E, {**calls.X86_64, **calls.COMMON}),
    "aarch64": _Machine(0xC00000B7, {**calls.AARCH64, **calls.COMMON}),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def is_supported() -> bool:
    """Return whether this kernel supports filters and this module knows the machine's call numbers."""
    return _machine() is not None and c_library().prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def install(*, programs: bool = False) -> bool:
    """Deny the calls to this thread, and to the threads it starts, for good. The process must have set no_new_privs.

    Args:
        programs: allow it to start processes and programs, which inherit the filter.

    Returns True if the filter is active, False if nothing changed.
    """
    machine = _machine()
    if machine is None:
        return False
    code = _filter(machine, os.getpid(), programs=programs)
    program = _Program(len(code) // 8, code)
    installed: int = c_library().prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0)
    return installed == 0


def _machine() -> _Machine | None:
    known = sys.platform.startswith("linux") and sys.byteorder == "little" and sys.maxsize > 2**32
    return _MACHINES.get(platform.machine()) if known else None


def _filter(machine: _Machine, pid: int, *, programs: bool) -> bytes:
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, machine.audit, 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER),
        _instruction(_AT_LEAST, _X32, 0, 1),
        _instruction(_RETURN, _KILL_PROCESS),
    ]
    for name, number in machine.calls.items():
        verdict = _verdict(name, pid, programs=programs)
        code += [_instruction(_EQUAL, number, 0, len(verdict)), *verdict]
    code += [_instruction(_AT_LEAST, _NEW, 0, 1), _deny(errno.ENOSYS), _deny(errno.EPERM)]
    return b"".join(code)


def _verdict(name: str, pid: int, *, programs: bool) -> list[bytes]:
    """Return the instructions that decide about a call of this name."""
    allow = _instruction(_RETURN, _ALLOW)
    if name == "clone":
        threads = [_instruction(_ANY_BIT, _CLONE_THREAD, 1, 0), _deny(errno.EPERM)]
        namespaces = [_instruction(_ANY_BIT, _CLONE_NAMESPACES, 0, 1), _deny(errno.EPERM)]
        shared_files = [_instruction(_ANY_BIT, _CLONE_THREAD, 0, 2), _instruction(_ANY_BIT, _CLONE_FILES, 1, 0)]
        return [_load(0), *namespaces, *([] if programs else threads), *shared_files, _deny(errno.EPERM), allow]
    if name == "mmap":
        # Shared memory without a file stays as long as one page of it is mapped: no limit on a process would see it.
        shared = [_instruction(_ANY_BIT, _MAP_ANONYMOUS, 0, 2), _instruction(_ANY_BIT, _MAP_SHARED, 0, 1)]
        return [_load(3), *shared, _deny(errno.EPERM), allow]
    if name in _STARTS:
        return [allow if programs else _deny(errno.EPERM)]
    if name in _OWN_PROCESS:
        return [_load(0), *_one_of({pid}, errno.EPERM)]
    if name in _OWN_OR_NONE:
        return [_load(0), *_one_of({pid, 0}, errno.EPERM)]
    if name in _CHOICES:
        argument, values, error = _CHOICES[name]
        return [_load(argument), *_one_of(values, error)]
    return [allow]


def _one_of(values: set[int] | frozenset[int], error: int) -> list[bytes]:
    """Return instructions that allow the call if the loaded argument is one of `values`."""
    tests = [
        _instruction(_EQUAL, value, left, 0) for left, value in zip(range(len(values), 0, -1), values, strict=True)
    ]
    return [*tests, _deny(error), _instruction(_RETURN, _ALLOW)]


def _load(argument: int) -> bytes:
    return _instruction(_LOAD, _ARGUMENTS[argument])


def _deny(error: int) -> bytes:
    return _instruction(_RETURN, _ERRNO | error)


def _instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)
