"""Namespaces: a process gets a file system that has only what it was given, and no other processes, network or IPC.

unshare ─> fork: the child is process 1, this one waits for it ─> a read-only root of bind mounts ─> pivot_root
The wall that needs no security module: user namespaces where this process is not root. Linux >= 5.12.
Source: namespaces(7), user_namespaces(7), pivot_root(2), mount_setattr(2)
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import signal
import stat
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

from millstream.services.process.c_library import c_library
from millstream.services.process.inheritance import die_with_parent

_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_READ_ONLY, _NO_SUID, _NO_DEV, _NO_EXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_FLAGS = _NO_SUID | _NO_DEV
_DETACH = 2
_MOUNT_SETATTR, _AT_RECURSIVE, _ATTRIBUTE_READ_ONLY = 442, 0x8000, 1
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
#: where the new root is mounted: a folder of every Linux
_PLACE = Path("/sys")
_ROOT_OPTIONS = b"size=4m,mode=0755"  # it holds names alone


def enter(reads: Iterable[Path], writes: Iterable[Path], *, network: bool = False) -> bool:
    """Go on in a child that sees only these paths; the calling process waits for it, and ends as it does.

    Paths that do not exist are left out. `network`: it keeps that of the machine. To be called before
    other threads start.

    Returns True in the child. False: namespaces cannot be had here; what is mounted is then as before.

    Raises OSError: they can be had, and a path could not be mounted.
    """
    folder = Path.cwd()
    if not _unshare(0 if network else _NEW_NET):
        return False
    parent, ours = os.pipe()
    child = os.fork()
    if child:
        os.close(parent)
        _wait(child)
    os.close(ours)
    die_with_parent()
    if select.select([parent], [], [], 0)[0]:  # its parent was gone before that
        os._exit(1)
    os.close(parent)
    if not _mount_root(reads, writes):
        return False
    with suppress(OSError):
        os.chdir(folder)
    return True


def _unshare(network: int) -> bool:
    """Give this process namespaces of its own; a user namespace only if it needs one for the others."""
    flags = _NEW_NS | _NEW_UTS | _NEW_IPC | _NEW_PID | network
    user, group = os.geteuid(), os.getegid()
    unshare = c_library().unshare
    if unshare(flags) == 0:
        return True
    if unshare(flags | _NEW_USER):
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError:
        return False
    return True


def _wait(child: int) -> NoReturn:
    """Wait for the child, and end as it did. Its end of the pipe stays open meanwhile."""
    for standard in range(3):  # readers of its output see the end of the child's
        os.close(standard)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _mount_root(reads: Iterable[Path], writes: Iterable[Path]) -> bool:
    """Make a file system of these paths the root. Returns False if this process may mount nothing."""
    given = [(path, False) for path in reads] + [(path, True) for path in writes]
    given = sorted(dict(given).items(), key=lambda one: len(one[0].parts))
    with ExitStack() as opened:
        # The place hides what is below it: everything is opened before.
        sources = [(path, _open(path, opened), writable) for path, writable in given]
        if _mount("none", Path("/"), "", _REC | _PRIVATE) or _mount("tmpfs", _PLACE, "tmpfs", _FLAGS, _ROOT_OPTIONS):
            return False
        proc = _PLACE / "proc"
        proc.mkdir()
        if _mount("proc", proc, "proc", _FLAGS | _NO_EXEC | _READ_ONLY):
            c_library().umount2(bytes(_PLACE), _DETACH)
            return False
        for path, source, writable in sources:
            if source is not None and not path.is_relative_to("/proc"):
                _bind(source, _PLACE / path.relative_to("/"), writable=writable)
    os.chdir(_PLACE)
    if c_library().syscall(_PIVOT_ROOT[platform.machine()], b".", b"."):
        raise _error("pivot_root")
    if c_library().umount2(b".", _DETACH):
        raise _error("umount2")
    os.chdir("/")
    if _mount("none", Path("/"), "", _REMOUNT | _BIND | _READ_ONLY | _FLAGS):
        raise _error("remount /")
    return True


def _open(path: Path, opened: ExitStack) -> int | None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    opened.callback(os.close, descriptor)
    return descriptor


def _bind(source: int, target: Path, *, writable: bool) -> None:
    """Mount an open file or folder, with what is mounted below it. Raises OSError."""
    if stat.S_ISDIR(os.fstat(source).st_mode):
        target.mkdir(parents=True, exist_ok=True)
    elif not os.path.lexists(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    if _mount(f"/proc/self/fd/{source}", target, "", _BIND | _REC):
        raise _error(f"mount {target}")
    if not writable:
        attributes = (ctypes.c_uint64 * 4)(_ATTRIBUTE_READ_ONLY, 0, 0, 0)
        size = ctypes.sizeof(attributes)
        if c_library().syscall(_MOUNT_SETATTR, -100, bytes(target), _AT_RECURSIVE, ctypes.byref(attributes), size):
            raise _error(f"mount_setattr {target}")


def _mount(source: str, target: Path, kind: str, flags: int, options: bytes | None = None) -> int:
    mount, encoded = c_library().mount, (os.fsencode(source), bytes(target), kind.encode() or None)
    status: int = mount(*encoded, ctypes.c_ulong(flags), options)
    return status


def _error(what: str) -> OSError:
    return OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
