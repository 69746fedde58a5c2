"""Disks that are small enough to be filled, and folders that cannot be written: for root too, and without a mock.

with small_disk(32 << 20) as disk: running_stack(tmp_path, disk=disk) …… disk.fill() …… disk.empty()

A small disk is the first of these that can be had: a tmpfs in a mount namespace of our own (most machines, root or
not), a tmpfs that root mounts (or sudo does), and the machine's /dev/shm if that is small, as it is in containers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

FILLER = "filler"
_SHM = Path("/dev/shm")
_SHM_BYTES_MAX = 256 << 20  # to fill more would take the memory that others need
_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Disk:
    """A place for a home. `folder`: its name for processes that are started with `prefix` before their command."""

    folder: Path
    prefix: tuple[str, ...] = ()
    root: Path = Path("/")  # theirs, as the tests see it

    def seen(self, path: Path) -> Path:
        """The file that those processes call `path`, as the tests call it."""
        return self.root / path.relative_to("/")

    @property
    def filler(self) -> Path:
        return self.seen(self.folder) / FILLER

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.seen(self.folder))
        return found.f_bavail * found.f_frsize

    def fill(self, *, left_bytes: int = 0) -> None:
        """Take all room but `left_bytes`, which is a multiple of the page size."""
        with self.filler.open("ab") as file:
            while (wanted := self.free_bytes - left_bytes) > 0:
                with suppress(OSError):  # another process took some of it meanwhile
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), wanted)

    def empty(self) -> None:
        """Make room again."""
        self.filler.unlink()


@contextmanager
def small_disk(size_bytes: int) -> Iterator[Disk]:
    """A disk of its own. The last resort, /dev/shm, has another size, at most 256 MiB. Fails where none can be had."""
    # A short path: sockets are below it.
    folder = Path(tempfile.mkdtemp(prefix="millstream-disk-"))
    why: list[str] = []
    try:
        for way in (_in_a_namespace, _mounted, _shared_memory):
            with way(folder, size_bytes, why) as disk:
                if disk is not None:
                    yield disk
                    return
        raise AssertionError(f"no small disk can be had here: {'; '.join(why)}")
    finally:
        folder.rmdir()


def small_disk_available() -> bool:
    """Whether `small_disk` can make one on this machine."""
    try:
        with small_disk(1 << 20):
            return True
    except AssertionError:
        return False


def plain_disk(folder: Path) -> Disk:
    """A folder as it is, for processes that have to respect its mode: root's would not."""
    if os.geteuid():
        return Disk(folder)
    return Disk(folder, ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--"))


@contextmanager
def _in_a_namespace(folder: Path, size_bytes: int, why: list[str]) -> Iterator[Disk | None]:
    """Mounted in a mount namespace of its own.

    A process keeps it until its input ends, so nothing stays if the test is killed.
    """
    if shutil.which("unshare") is None:
        why.append("unshare is not installed")
        yield None
        return
    mount_and_wait = f'{_mount(size_bytes)} "$0" && echo mounted && exec cat'
    holder = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--mount", "--", "sh", "-c", mount_and_wait, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout
        assert holder.stderr
        if holder.stdout.readline():
            prefix = ("nsenter", f"--target={holder.pid}", "--user", "--mount", "--preserve-credentials", "--")
            yield Disk(folder, prefix, Path(f"/proc/{holder.pid}/root"))
        else:
            why.append(holder.stderr.read().strip())
            yield None


@contextmanager
def _mounted(folder: Path, size_bytes: int, why: list[str]) -> Iterator[Disk | None]:
    sudo = ("sudo", "-n") if os.geteuid() else ()
    mount = (*sudo, *_mount(size_bytes).split(), "-o", f"uid={os.geteuid()},gid={os.getegid()}", str(folder))
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True, timeout=_WAIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        why.append(f"{' '.join(mount)}: {getattr(error, 'stderr', None) or error}".strip())
        yield None
        return
    try:
        yield Disk(folder)
    finally:
        subprocess.run((*sudo, "umount", str(folder)), check=True, timeout=_WAIT_S)


@contextmanager
def _shared_memory(folder: Path, _: int, why: list[str]) -> Iterator[Disk | None]:
    size_bytes = shutil.disk_usage(_SHM).total
    if size_bytes > _SHM_BYTES_MAX:
        why.append(f"{_SHM} has {size_bytes >> 20} MiB, too many to fill")
        yield None
        return
    place = _SHM / folder.name
    place.mkdir(mode=0o700)
    try:
        yield Disk(place)
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(place)


def _mount(size_bytes: int) -> str:
    return f"mount -t tmpfs -o size={size_bytes},mode=700 millstream-test"
