"""A process gives up all system calls but those that computing on its own files and memory needs.

A filter in classic BPF: the calls below ─> allowed, some by their arguments; all others ─> EPERM; those that came with
Linux 5.1 and later ─> ENOSYS, since C libraries then use an older call. Linux on x86-64 and 64-bit ARM.
Source: Documentation/userspace-api/seccomp_filter.rst, include/uapi/linux/{seccomp,filter,audit}.h; the numbers from
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h. Calls that are left out on one machine do
not exist there.
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

#: These have the same number on all architectures, as every call since Linux 5.1.
_COMMON: dict[str, int] = {
    "pidfd_open": 434, "close_range": 436, "openat2": 437, "faccessat2": 439, "epoll_pwait2": 441, "futex_waitv": 449,
    "map_shadow_stack": 453, "futex_wake": 454, "futex_wait": 455, "futex_requeue": 456, "mseal": 462,
}  # fmt: skip
_X86_64: dict[str, int] = {
    # files
    "read": 0, "write": 1, "open": 2, "openat": 257, "creat": 85, "close": 3, "stat": 4, "fstat": 5, "lstat": 6,
    "newfstatat": 262, "statx": 332, "lseek": 8, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20,
    "preadv": 295, "pwritev": 296, "preadv2": 327, "pwritev2": 328, "access": 21, "faccessat": 269, "dup": 32,
    "dup2": 33, "dup3": 292, "flock": 73, "fsync": 74, "fdatasync": 75, "ftruncate": 77, "fallocate": 285,
    "getdents": 78, "getdents64": 217, "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "renameat": 264,
    "renameat2": 316, "mkdir": 83, "mkdirat": 258, "rmdir": 84, "link": 86, "linkat": 265, "unlink": 87,
    "unlinkat": 263, "readlink": 89, "readlinkat": 267, "umask": 95, "statfs": 137, "fstatfs": 138, "sendfile": 40,
    "copy_file_range": 326, "fadvise64": 221, "readahead": 187, "getxattr": 191, "lgetxattr": 192, "fgetxattr": 193,
    "listxattr": 194, "llistxattr": 195, "flistxattr": 196,
    # waiting
    "pipe": 22, "pipe2": 293, "poll": 7, "ppoll": 271, "select": 23, "pselect6": 270, "epoll_create": 213,
    "epoll_create1": 291, "epoll_ctl": 233, "epoll_wait": 232, "epoll_pwait": 281, "eventfd": 284, "eventfd2": 290,
    "timerfd_create": 283, "timerfd_settime": 286, "timerfd_gettime": 287, "signalfd": 282, "signalfd4": 289,
    # memory
    "mmap": 9, "munmap": 11, "mprotect": 10, "mremap": 25, "brk": 12, "madvise": 28, "mincore": 27, "msync": 26,
    "mlock": 149, "mlock2": 325, "munlock": 150, "membarrier": 324, "get_mempolicy": 239, "set_mempolicy": 238,
    "mbind": 237,
    # threads
    "futex": 202, "set_robust_list": 273, "set_tid_address": 218, "rseq": 334, "gettid": 186, "getpid": 39,
    "getppid": 110, "getpgid": 121, "getpgrp": 111, "getsid": 124, "getcpu": 309, "sched_yield": 24,
    "sched_getaffinity": 204, "sched_getattr": 315, "sched_getparam": 143, "sched_getscheduler": 145,
    "sched_get_priority_max": 146, "sched_get_priority_min": 147, "sched_rr_get_interval": 148, "getpriority": 140,
    "exit": 60, "exit_group": 231, "restart_syscall": 219, "arch_prctl": 158, "wait4": 61, "waitid": 247,
    # signals, time
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigpending": 127, "rt_sigreturn": 15, "rt_sigsuspend": 130,
    "rt_sigtimedwait": 128, "sigaltstack": 131, "pause": 34, "alarm": 37, "getitimer": 36, "setitimer": 38,
    "timer_create": 222, "timer_settime": 223, "timer_gettime": 224, "timer_getoverrun": 225, "timer_delete": 226,
    "nanosleep": 35, "clock_nanosleep": 230, "clock_gettime": 228, "clock_getres": 229, "gettimeofday": 96,
    "time": 201, "times": 100,
    # system
    "uname": 63, "sysinfo": 99, "getrusage": 98, "getrlimit": 97, "setrlimit": 160, "getrandom": 318, "getuid": 102,
    "geteuid": 107, "getgid": 104, "getegid": 108, "getresuid": 118, "getresgid": 120, "getgroups": 115,
    "capget": 125,
    # judged by their arguments, or for programs alone
    "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "tkill": 200, "tgkill": 234, "prlimit64": 302,
    "sched_setaffinity": 203, "prctl": 157, "ioctl": 16, "fcntl": 72,
}  # fmt: skip

_AARCH64: dict[str, int] = {
    # files
    "read": 63, "write": 64, "openat": 56, "close": 57, "fstat": 80, "newfstatat": 79, "statx": 291, "lseek": 62,
    "pread64": 67, "pwrite64": 68, "readv": 65, "writev": 66, "preadv": 69, "pwritev": 70, "preadv2": 286,
    "pwritev2": 287, "faccessat": 48, "dup": 23, "dup3": 24, "flock": 32, "fsync": 82, "fdatasync": 83,
    "ftruncate": 46, "fallocate": 47, "getdents64": 61, "getcwd": 17, "chdir": 49, "fchdir": 50, "renameat": 38,
    "renameat2": 276, "mkdirat": 34, "linkat": 37, "unlinkat": 35, "readlinkat": 78, "umask": 166, "statfs": 43,
    "fstatfs": 44, "sendfile": 71, "copy_file_range": 285, "fadvise64": 223, "readahead": 213, "getxattr": 8,
    "lgetxattr": 9, "fgetxattr": 10, "listxattr": 11, "llistxattr": 12, "flistxattr": 13,
    # waiting
    "pipe2": 59, "ppoll": 73, "pselect6": 72, "epoll_create1": 20, "epoll_ctl": 21, "epoll_pwait": 22,
    "eventfd2": 19, "timerfd_create": 85, "timerfd_settime": 86, "timerfd_gettime": 87, "signalfd4": 74,
    # memory
    "mmap": 222, "munmap": 215, "mprotect": 226, "mremap": 216, "brk": 214, "madvise": 233, "mincore": 232,
    "msync": 227, "mlock": 228, "mlock2": 284, "munlock": 229, "membarrier": 283, "get_mempolicy": 236,
    "set_mempolicy": 237, "mbind": 235,
    # threads
    "futex": 98, "set_robust_list": 99, "set_tid_address": 96, "rseq": 293, "gettid": 178, "getpid": 172,
    "getppid": 173, "getpgid": 155, "getsid": 156, "getcpu": 168, "sched_yield": 124, "sched_getaffinity": 123,
    "sched_getattr": 275, "sched_getparam": 121, "sched_getscheduler": 120, "sched_get_priority_max": 125,
    "sched_get_priority_min": 126, "sched_rr_get_interval": 127, "getpriority": 141, "exit": 93, "exit_group": 94,
    "restart_syscall": 128, "wait4": 260, "waitid": 95,
    # signals, time
    "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigpending": 136, "rt_sigreturn": 139, "rt_sigsuspend": 133,
    "rt_sigtimedwait": 137, "sigaltstack": 132, "getitimer": 102, "setitimer": 103, "timer_create": 107,
    "timer_settime": 110, "timer_gettime": 108, "timer_getoverrun": 109, "timer_delete": 111, "nanosleep": 101,
    "clock_nanosleep": 115, "clock_gettime": 113, "clock_getres": 114, "gettimeofday": 169, "times": 153,
    # system
    "uname": 160, "sysinfo": 179, "getrusage": 165, "getrlimit": 163, "setrlimit": 164, "getrandom": 278,
    "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "getresuid": 148, "getresgid": 150,
    "getgroups": 158, "capget": 90,
    # judged by their arguments, or for programs alone
    "clone": 220, "execve": 221, "kill": 129, "tkill": 130, "tgkill": 131, "prlimit64": 261,
    "sched_setaffinity": 122, "prctl": 167, "ioctl": 29, "fcntl": 25,
}  # fmt: skip


#: to reach the network, besides
_CONNECTS_X86_64 = {
    "socket": 41, "connect": 42, "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "shutdown": 48,
    "getsockname": 51, "getpeername": 52, "setsockopt": 54, "getsockopt": 55, "recvmmsg": 299, "sendmmsg": 307,
}  # fmt: skip
_CONNECTS_AARCH64 = {
    "socket": 198, "connect": 203, "getsockname": 204, "getpeername": 205, "sendto": 206, "recvfrom": 207,
    "setsockopt": 208, "getsockopt": 209, "shutdown": 210, "sendmsg": 211, "recvmsg": 212, "recvmmsg": 243,
    "sendmmsg": 269,
}  # fmt: skip

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
    # AF_INET, AF_INET6; not AF_UNIX, by which local services are reached
    "socket": (0, frozenset({2, 10}), errno.EPERM),
    # PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_READ, PR_GET_TIMERSLACK, PR_SET_NO_NEW_PRIVS,
    # PR_GET_NO_NEW_PRIVS, PR_GET_THP_DISABLE, PR_SVE_GET_VL, PR_SET_VMA; not PR_SET_PDEATHSIG
    "prctl": (0, frozenset({3, 15, 16, 23, 30, 38, 39, 42, 51, 0x53564D41}), errno.EPERM),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; not FIOASYNC and FIOSETOWN, which send signals
    "ioctl": (1, frozenset({0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451}), errno.ENOTTY),
    # F_DUPFD to F_SETLKW, locks of open files, F_DUPFD_CLOEXEC, F_GETPIPE_SZ; not F_SETOWN, which sends signals
    "fcntl": (1, frozenset({*range(8), 36, 37, 38, 1030, 1032}), errno.EPERM),
    # CLOSE_RANGE_CLOEXEC; not CLOSE_RANGE_UNSHARE: a thread's own files would not be seen (`group_watch`)
    "close_range": (2, frozenset({0, 4}), errno.EPERM),
}


class _Machine(NamedTuple):
    """An architecture: the kernel's AUDIT_ARCH_… constant, and the numbers of allowed calls by name.

    `connects`: further ones, for processes that reach the network.
    """

    audit: int
    calls: dict[str, int]
    connects: dict[str, int]


_MACHINES = {
    "x86_64": _Machine(0xC000003E, {**_X86_64, **_COMMON}, _CONNECTS_X86_64),
    "aarch64": _Machine(0xC00000B7, {**_AARCH64, **_COMMON}, _CONNECTS_AARCH64),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def is_supported() -> bool:
    """Return whether this kernel supports filters and this module knows the machine's call numbers."""
    return _machine() is not None and c_library().prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def install(*, programs: bool = False, network: bool = False) -> bool:
    """Deny the calls to this thread, and to the threads it starts, for good. The process must have set no_new_privs.

    Args:
        programs: allow it to start processes and programs, which inherit the filter.
        network: allow it to connect to addresses of the internet, and to listen on none.

    Returns True if the filter is active, False if nothing changed.
    """
    machine = _machine()
    if machine is None:
        return False
    calls = {**machine.calls, **(machine.connects if network else {})}
    code = _filter(machine._replace(calls=calls), os.getpid(), programs=programs)
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
