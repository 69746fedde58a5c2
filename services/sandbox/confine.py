"""The sandbox of every process that reads or runs an upload: what it inherits, may take, and may reach.

begin ─> no descriptors but the standard ones, ends with its parent
confine(limits, reads, writes) ─> files: Landlock, or namespaces ─> calls: seccomp ─> the active Layers
A layer that the kernel lacks is skipped: who confines itself decides what it may do without (`Layers.stand`).
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol, TypeVar

from millstream.services.process.c_library import c_library
from millstream.services.process.inheritance import close_all_but, die_with_parent
from millstream.services.sandbox import landlock, namespaces, seccomp

#: open files and pipes; a pipe may hold 64 KiB of the kernel's memory, and libraries open hundreds of files at most
DESCRIPTORS_MAX = 1024
_PR_SET_NO_NEW_PRIVS = 38
_CAPSET: dict[str, int] = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
#: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root in a container may not own the files; Landlock limits access to them
_KEPT_CAPABILITIES = 0b110
_PACKAGE = Path(__file__).parents[2]  # in a checkout it contains links to the folders; Landlock rules follow no links
#: their own places in a checkout; a plug-in of another distribution is among the libraries
_FOLDERS = tuple((_PACKAGE / name).resolve() for name in ("services", "plugins"))
_SYSTEM = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store", "/etc/ld.so.cache", "/etc/alternatives",
    "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu",
    "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random",
)  # fmt: skip
#: the interpreters of programs: each is a file that the kernel executes, too
_LOADERS = tuple(
    Path(name)
    for name in (
        "/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1", "/lib/ld-musl-x86_64.so.1",
        "/lib/ld-musl-aarch64.so.1",
    )
)  # fmt: skip


#: what drivers of accelerators and their loaders read
_DRIVERS = tuple(map(Path, ("/proc", "/sys", "/etc/OpenCL", "/etc/nvidia", "/etc/vulkan", "/usr/share/nvidia", "/opt")))
#: what looks up names of machines, and knows whose certificates hold
_NAMES_AND_CERTIFICATES = tuple(
    map(
        Path,
        ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/pki", "/usr/share/ca-certificates"),
    )
)
#: The links by which programs find each other. Landlock asks about the files themselves, a mount about the names.
_PROGRAMS = (Path("/usr/bin"), Path("/bin"))


class Task(Protocol):
    """What a process is asked to do with the files of an upload. `folder`: theirs."""

    @property
    def folder(self) -> Path: ...


T = TypeVar("T", bound=Task)


class Limits(NamedTuple):
    """What a confined process may take.

    Args:
        memory_bytes: of its address space.
        cpu_s: seconds of processor time.
        file_bytes: of each file that it writes.
        reserved_free: count only the memory that it may write to: compilers reserve far more than they use.
    """

    memory_bytes: int
    cpu_s: int
    file_bytes: int
    reserved_free: bool = False


class Layers(NamedTuple):
    """The active layers. `landlock` is the kernel's ABI version; 0 if it has none. `namespaces` take its place then."""

    landlock: int
    namespaces: bool
    seccomp: bool

    @property
    def stand(self) -> bool:
        """Whether they hold what executes code: files and calls are both restricted."""
        return self.seccomp and (self.landlock > 0 or self.namespaces)

    def __str__(self) -> str:
        names = (
            (f"Landlock {self.landlock}", self.landlock),
            ("namespaces", self.namespaces),
            ("seccomp", self.seccomp),
        )
        return ", ".join(name for name, active in names if active) or "nothing"


def begin(parent: int) -> None:
    """Close what this process inherited but its standard descriptors, and have it end with `parent`.

    To be called first of all: nothing that came from somebody else was read yet.
    """
    close_all_but(0, 1, 2)
    die_with_parent(parent)


def serve_task(answer: Callable[[bytes], bytes]) -> NoReturn:
    """Answer the task on standard input, print the answer, and exit with 0. What libraries print is standard error."""
    task = sys.stdin.buffer.read()
    output = os.dup(1)
    os.dup2(2, 1)
    answered = answer(task)
    with os.fdopen(output, "wb") as file:
        file.write(answered)
    sys.stderr.flush()
    os._exit(0)  # skips destructors of libraries, which may crash after a broken model


def serve_forked(
    answer: Callable[[T], bytes], read: Callable[[bytes], T], module: str, set_title: Callable[..., None] | None
) -> NoReturn:
    """Answer one task, as `serve_task` does, in a process that was forked for it, or started for it.

    Args:
        answer: returns the report on a task.
        read: returns the task of a document.
        module: of the process, for its command line.
        set_title: replaces the command line of a process that was forked, so that `ps` shows what it reads. Such a
            process ends with its parent already; None: it was started.
    """
    if set_title is None:
        begin(int(sys.argv[-1]))

    def answer_document(document: bytes) -> bytes:
        task = read(document)
        if set_title is not None:
            set_title(sys.executable, "-m", module, str(task.folder))
        return answer(task)

    serve_task(answer_document)


def confine(
    reads: Iterable[Path],
    writes: Iterable[Path],
    programs: Iterable[Path] = (),
    *,
    limits: Limits | None = None,
    accelerator: bool = False,
    installs: bool = False,
    network: bool = False,
) -> Layers:
    """Restrict this process for good: no network, only the given files, no new processes but of `programs`.

    Call it from the main thread before other threads start. It may return in a child of the process, which then waits
    for it (`namespaces.enter`).

    Args:
        reads: files and folders to allow reading, besides the libraries.
        writes: files and folders to allow reading and writing.
        programs: files and folders of programs that it may start, which inherit the restrictions; none: it may start
            no process.
        limits: what it may take; None: what this process may.
        accelerator: whether it uses one: its driver's files may be used, and its calls are its own, so that there is no
            filter of calls.
        network: whether it may connect to other machines.
        installs: whether it installs packages: it reaches the network, and only its files are restricted, by Landlock.

    Returns:
        The layers that are active now.

    Raises:
        OSError: a layer that the kernel has cannot be applied.
    """
    if limits is not None:
        _limit(limits)
    if not sys.platform.startswith("linux"):
        return Layers(0, False, False)
    reads, writes, programs = [*reads], [*writes], [*programs]
    reads = [*_library_paths([*reads, *writes]), *reads, *(_NAMES_AND_CERTIFICATES if network else ())]
    writes = [*writes, Path("/dev/null")]
    started = [*programs, *_LOADERS] if programs else []
    # The second wall is for kernels without the first one: it takes a process more, and some milliseconds.
    apart = not (accelerator or installs or landlock.abi()) and namespaces.enter(
        [*reads, *started, *(_PROGRAMS if started else ())], writes, network=network
    )
    libc = c_library()
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    _drop_capabilities(libc)
    if installs:
        return Layers(landlock.restrict(reads, writes, started, installs=True), False, False)
    if accelerator:
        return Layers(landlock.restrict([*reads, *_DRIVERS], writes, started, (Path("/dev"),)), False, False)
    abi = landlock.restrict(reads, writes, started, network=network)
    return Layers(abi, apart, seccomp.install(programs=bool(programs), network=network))


def _limit(limits: Limits) -> None:
    """Limit the memory, processor time and files of this process. Raises OSError."""
    for limit, value in (
        (resource.RLIMIT_DATA if limits.reserved_free else resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, DESCRIPTORS_MAX),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    if sys.platform == "linux":
        with suppress(OSError):  # makes the OOM killer choose this process first
            Path("/proc/self/oom_score_adj").write_text("1000")


def prepare() -> None:
    """Do the part of `confine` that is the same in all processes that this one forks."""
    _installed_paths()
    _imported_paths()


def _library_paths(granted: Sequence[Path]) -> list[Path]:
    """Return the folders of Python, its packages and native libraries; `granted` are the paths the caller allows."""
    # An entry of sys.path that contains a granted path is a folder of models, not a library.
    imported = [folder for folder in _imported_paths() if not any(path.is_relative_to(folder) for path in granted)]
    return list(dict.fromkeys([*_installed_paths(), *imported]))


@cache
def _installed_paths() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    folders = [Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [Path(prefix) / "lib" for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    return (*(folder for folder in folders if folder.is_absolute()), _PACKAGE, *_FOLDERS, *map(Path, _SYSTEM))


@cache
def _imported_paths() -> tuple[Path, ...]:
    return tuple(folder for folder in map(Path, filter(None, sys.path)) if folder.is_absolute())


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Drop all capabilities except those for files. Does nothing on an architecture without a known call number."""
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


def available() -> Layers:
    """Return the layers that a new process gets; starts one only to look for what stands in for Landlock.

    Raises OSError if it cannot be confined.
    """
    abi = landlock.abi()
    return Layers(abi, False, seccomp.is_supported()) if abi or not sys.platform.startswith("linux") else probe()


def probe() -> Layers:
    """Return the layers that a new process gets, by starting one. Raises OSError if it cannot be confined."""
    result = subprocess.run(
        [sys.executable, "-m", "millstream.services.sandbox.confine"],
        cwd=_PACKAGE.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=30,
    )
    if result.returncode:
        raise OSError(result.returncode, result.stderr.decode(errors="replace").strip()[-300:])
    return Layers(*json.loads(result.stdout))


if __name__ == "__main__":
    print(json.dumps(confine((), ())))
