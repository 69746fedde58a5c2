"""seccomp: a process gives up system calls for the network, other processes and programs, and the machine's settings.

A filter in classic BPF: denied calls ─> EPERM; all others are allowed. Linux on x86-64 and 64-bit ARM.
Source: Documentation/userspace-api/seccomp_filter.rst, include/uapi/linux/{seccomp,filter,audit}.h; call numbers:
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
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

_PR_GET_SECCOMP, _PR_SET_SECCOMP, _MODE_FILTER = 21, 22, 2
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
#: offsets in struct seccomp_data; that of the argument is its lower half on little-endian machines
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16
_CLONE_THREAD = 0x00010000
#: from this number on x86-64 has a second table of the same calls (x32)
_X32 = 0x40000000


class _Machine(NamedTuple):
    """An architecture: the kernel's AUDIT_ARCH_… constant, and its denied calls' numbers by name."""

    audit: int
    calls: dict[str, int]


#: denied calls that have the same number on all architectures
_COMMON = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "clone3": 435,
    "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "process_mrelease": 448, "fchmodat2": 452,
    "setxattrat": 463, "removexattrat": 466,
}  # fmt: skip
_X86_64 = {
    "socket": 41, "connect": 42, "accept": 43, "sendto": 44, "sendmsg": 46, "bind": 49, "listen": 50, "socketpair": 53,
    "accept4": 288, "sendmmsg": 307, "recvmsg": 47, "recvmmsg": 299, "clone": 56, "fork": 57, "vfork": 58, "execve": 59,
    "execveat": 322, "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297,
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "prlimit64": 302, "shmget": 29,
    "shmat": 30, "semget": 64, "msgget": 68, "mq_open": 240, "truncate": 76, "chmod": 90, "fchmod": 91, "fchmodat": 268,
    "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260, "utime": 132, "utimes": 235, "futimesat": 261,
    "utimensat": 280, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198,
    "fremovexattr": 199, "symlink": 88, "symlinkat": 266, "mknod": 133, "mknodat": 259, "setpriority": 141,
    "sched_setparam": 142, "sched_setscheduler": 144, "sched_setattr": 314, "ioprio_set": 251, "pivot_root": 155,
    "acct": 163, "chroot": 161, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
    "sethostname": 170, "setdomainname": 171, "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "iopl": 172,
    "ioperm": 173, "init_module": 175, "delete_module": 176, "finit_module": 313, "quotactl": 179, "kexec_load": 246,
    "kexec_file_load": 320, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "setns": 308,
    "perf_event_open": 298, "name_to_handle_at": 303, "open_by_handle_at": 304, "bpf": 321, "userfaultfd": 323,
    "migrate_pages": 256, "move_pages": 279, "syslog": 103, "fanotify_init": 300, "setpgid": 109, "setsid": 112,
}  # fmt: skip
_AARCH64 = {
    "socket": 198, "socketpair": 199, "bind": 200, "listen": 201, "accept": 202, "connect": 203, "sendto": 206,
    "sendmsg": 211, "recvmsg": 212, "accept4": 242, "recvmmsg": 243, "sendmmsg": 269, "clone": 220, "execve": 221,
    "execveat": 281, "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "prlimit64": 261, "shmget": 194,
    "shmat": 196, "semget": 190, "msgget": 186, "mq_open": 180, "truncate": 45, "fchmod": 52, "fchmodat": 53,
    "fchownat": 54, "fchown": 55, "utimensat": 88, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14,
    "lremovexattr": 15, "fremovexattr": 16, "symlinkat": 36, "mknodat": 33, "setpriority": 140, "sched_setparam": 118,
    "sched_setscheduler": 119, "sched_setattr": 274, "ioprio_set": 30, "pivot_root": 41, "acct": 89, "chroot": 51,
    "mount": 40, "umount2": 39, "swapon": 224, "swapoff": 225, "reboot": 142, "sethostname": 161, "setdomainname": 162,
    "settimeofday": 170, "clock_settime": 112, "adjtimex": 171, "init_module": 105, "delete_module": 106,
    "finit_module": 273, "quotactl": 60, "kexec_load": 104, "kexec_file_load": 294, "add_key": 217, "request_key": 218,
    "keyctl": 219, "unshare": 97, "setns": 268, "perf_event_open": 241, "name_to_handle_at": 264,
    "open_by_handle_at": 265, "bpf": 280, "userfaultfd": 282, "migrate_pages": 238, "move_pages": 239, "syslog": 116,
    "fanotify_init": 262, "setpgid": 154, "setsid": 157,
}  # fmt: skip
_MACHINES = {
    "x86_64": _Machine(0xC000003E, {**_COMMON, **_X86_64}),
    "aarch64": _Machine(0xC00000B7, {**_COMMON, **_AARCH64}),
}
#: calls that start processes and programs, for compilers that need them; which programs, Landlock limits
_STARTS = frozenset({"clone", "fork", "vfork", "execve"})
#: allowed if their first argument is this process
_OWN_PROCESS = ("kill", "tgkill", "prlimit64")


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
    code = _filter(machine, os.getpid(), _STARTS if programs else frozenset())
    program = _Program(len(code) // 8, code)
    installed: int = c_library().prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0)
    return installed == 0


def _machine() -> _Machine | None:
    known = sys.platform.startswith("linux") and sys.byteorder == "little" and sys.maxsize > 2**32
    return _MACHINES.get(platform.machine()) if known else None


def _filter(machine: _Machine, pid: int, allowed: frozenset[str] = frozenset()) -> bytes:
    denied = _ERRNO | errno.EPERM
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, machine.audit, 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER),
        _instruction(_AT_LEAST, _X32, 0, 1),
        _instruction(_RETURN, _KILL_PROCESS),
    ]
    for name, number in machine.calls.items():
        if name in allowed:
            continue
        if name == "clone":  # allowed for threads, denied for processes
            verdict = [_instruction(_LOAD, _ARGUMENT), _instruction(_ANY_BIT, _CLONE_THREAD, 0, 1)]
            verdict += [_instruction(_RETURN, _ALLOW), _instruction(_RETURN, denied)]
        elif (
            name == "clone3"
        ):  # its flags are in memory, which a filter cannot read; on ENOSYS libc falls back to clone
            verdict = [_instruction(_RETURN, _ERRNO | errno.ENOSYS)]
        elif name in _OWN_PROCESS:
            verdict = [_instruction(_LOAD, _ARGUMENT), _instruction(_EQUAL, pid, 1, 0)]
            verdict += [_instruction(_EQUAL, 0, 0, 1) if name == "prlimit64" else _instruction(_RETURN, denied)]
            verdict += [_instruction(_RETURN, _ALLOW), _instruction(_RETURN, denied)]
        else:
            verdict = [_instruction(_RETURN, denied)]
        code += [_instruction(_EQUAL, number, 0, len(verdict)), *verdict]
    return b"".join([*code, _instruction(_RETURN, _ALLOW)])


def _instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)
