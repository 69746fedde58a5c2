"""Provides disks small enough to fill, and folders that cannot be written, even by root; nothing is mocked.

with small_disk(32 << 20) as disk: running_stack(tmp_path, disk=disk) …… disk.fill() …… disk.empty()

A small disk is the first of these that is available: a tmpfs in a mount namespace of our own (most machines, root or
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
_SHM_BYTES_MAX = 256 << 20  # filling more would take memory that other processes need
_WAIT_S = 240.0


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk for a home. `folder` is its path for processes whose command begins with `prefix`."""

    folder: Path
    prefix: tuple[str, ...] = ()
    root: Path = Path("/")  # the root folder of those processes, as the tests see it

    def seen(self, path: Path) -> Path:
        """Return the path under which the tests see the file that those processes call `path`."""
        return self.root / path.relative_to("/")

    @property
    def filler(self) -> Path:
        return self.seen(self.folder) / FILLER

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.seen(self.folder))
        return found.f_bavail * found.f_frsize

    def fill(self, *, left_bytes: int = 0) -> None:
        """Fill the disk except for `left_bytes`, a multiple of the page size."""
        with self.filler.open("ab") as file:
            while (wanted := self.free_bytes - left_bytes) > 0:
                with suppress(OSError):  # another process took some of it meanwhile
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), wanted)

    def empty(self) -> None:
        """Free the space that `fill` took."""
        self.filler.unlink()


@contextmanager
def small_disk(size_bytes: int) -> Iterator[Disk]:
    """Yield a disk of this size; the last resort, /dev/shm, has its own, at most 256 MiB. Fails if there is none."""
    # The path is short because sockets are below it.
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
    """Return whether `small_disk` works on this machine."""
    try:
        with small_disk(1 << 20):
            return True
    except AssertionError:
        return False


def plain_disk(folder: Path) -> Disk:
    """Return a folder as a disk for processes that respect its mode, which processes of root would not."""
    if os.geteuid():
        return Disk(folder)
    return Disk(folder, ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--"))


@contextmanager
def _in_a_namespace(folder: Path, size_bytes: int, why: list[str]) -> Iterator[Disk | None]:
    """Yield a tmpfs in a mount namespace of its own; None if that is not possible.

    A process keeps the namespace until its input ends, so nothing is left if the test is killed.
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
