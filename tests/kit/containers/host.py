"""Runs containers as processes of this machine: a network of their own, and for each a root of its own.

Host ─> a network namespace with nothing but a loopback interface, so ports are free, and folders for volumes
Host.start(Container) ─> a process with the user, root, mounts, environment and working folder of the container

A root consists of this machine's /usr and Python, read-only, and the folders of the image. Not as in a container: all
share one network, process ids are this machine's, and memory and CPUs are not limited. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit.containers.image import Image
from tests.kit.containers.name_server import NameServer
from tests.kit.containers.namespaces import NO_RIGHTS
from tests.kit.wait import wait_until

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_LOOPBACK_UP = (
    "import fcntl, socket, struct, sys;"
    "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sH14s', b'lo', 1, b''));"  # SIOCSIFFLAGS, IFF_UP
    "print('up', flush=True); sys.stdin.read()"
)
STOP_S_MAX = 240.0
RUN_S_MAX = 240.0
_USERS = ("root:x:0:0::/:/bin/sh", "millstream:x:10001:10001::/var/lib/millstream:/usr/sbin/nologin")


@dataclass(frozen=True, slots=True)
class Mount:
    source: Path
    target: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Container:
    """What an engine is told of a container."""

    name: str
    image: Image
    command: tuple[str, ...]
    environment: Mapping[str, str]
    user: str  # UID:GID
    mounts: tuple[Mount, ...] = ()
    temporary: Mapping[str, str] = field(default_factory=dict)  # path -> options of its tmpfs
    read_only: bool = True
    health: tuple[str, ...] = ()
    groups: str = ""  # further groups of the user


class Host:
    """A machine for containers. Close it: its containers end with it."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        """Args: `folder` has the volumes; `names` are those of hosts that are this machine."""
        self.folder = folder
        self.running: dict[str, Running] = {}
        self._started: list[Running] = []
        self._hosts = folder / "hosts"
        self._hosts.write_text("127.0.0.1 localhost\n" + "".join(f"127.0.0.1 {name}\n" for name in names))
        self._passwd = folder / "passwd"
        self._passwd.write_text("\n".join(_USERS) + "\n")
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--", sys.executable, "-S", "-c", _LOOPBACK_UP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "up\n"
        with self.network():
            self._name_server = NameServer(names)

    def volume(self, name: str, user: str) -> Path:
        """Return the folder of a volume. A new one belongs to `user`, as it would with an image that says so."""
        folder = self.folder / "volumes" / name
        if not folder.exists():
            folder.mkdir(parents=True)
            os.chown(folder, *map(int, user.split(":")))
        return folder

    def shared_memory(self, name: str) -> Path:
        """Return the folder that containers with this name of a /dev/shm share."""
        folder = self.folder / "shm" / name
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o1777)
        return folder

    def start(self, container: Container) -> Running:
        running = Running(self, container)
        self._started.append(running)
        self.running[container.name] = running
        return running

    @contextmanager
    def network(self) -> Iterator[None]:
        """Let this thread open connections in the network of the containers."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net", "rb") as own, open(f"/proc/{self._holder.pid}/ns/net", "rb") as theirs:
            assert libc.setns(theirs.fileno(), _NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert libc.setns(own.fileno(), _NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())

    def prefix(self) -> list[str]:
        """Return the command that runs another one in the network of the containers."""
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--"]

    def close(self) -> None:
        for running in reversed(self._started):
            running.kill()
        self._name_server.close()
        self._holder.communicate(timeout=STOP_S_MAX)

    def root_script(self, container: Container) -> str:
        """Return the commands that make the root of a container at $ROOT, in a mount namespace of its own."""
        lines = ["mount -t tmpfs -o mode=755 root $ROOT", "cd $ROOT", "mkdir -p etc dev proc sys tmp run var/lib root"]
        for name in ("bin", "lib", "lib64", "sbin"):  # links to /usr on most distributions
            path = Path("/") / name
            if path.is_symlink():
                lines.append(f"ln -s {path.readlink()} {name}")
            elif path.is_dir():
                lines += _bound(path, str(path), read_only=True)
        lines += _bound(Path("/usr"), "/usr", read_only=True)
        if not sys.base_prefix.startswith("/usr/") and sys.base_prefix != "/usr":
            lines += _bound(Path(sys.base_prefix), sys.base_prefix, read_only=True)
        for name in ("ssl", "ld.so.cache", "nsswitch.conf", "localtime", "alternatives", "mime.types"):
            if (Path("/etc") / name).exists():
                lines += _bound(Path("/etc") / name, f"/etc/{name}", read_only=True)
        lines += [f"cp {self._hosts} etc/hosts", f"cp {self._passwd} etc/passwd"]
        lines += ["echo nameserver 127.0.0.1 >etc/resolv.conf"]
        lines += ["mount --rbind /proc proc", "mount --rbind /dev dev", "mount -t tmpfs -o mode=1777 shm dev/shm"]
        for target, source in container.image.folders.items():
            lines += _bound(source, target, read_only=True)
        if not container.read_only:
            lines += ["chmod 1777 tmp"]
        uid, gid = container.user.split(":")
        for owned in container.image.owned:
            lines += [f"mkdir -p .{owned}", f"chown {uid}:{gid} .{owned}"]
        for place, options in container.temporary.items():
            how = f"nosuid,nodev,noexec,{options or 'mode=1777'}"
            lines += [f"mkdir -p .{place}", f"mount -t tmpfs -o {how} tmp .{place}"]
        for mount in container.mounts:
            lines += _bound(mount.source, mount.target, read_only=mount.read_only)
        lines += [f"mkdir -p .{container.image.folder}"]
        if container.read_only:
            lines += ["mount -o remount,ro,mode=755 $ROOT"]
        return "\n".join(lines)


def _bound(source: Path, target: str, *, read_only: bool) -> list[str]:
    at, source_text = shlex.quote(f".{target}"), shlex.quote(str(source.resolve()))
    make = f"mkdir -p {at}" if source.is_dir() else f"mkdir -p $(dirname {at}) && touch {at}"
    lines = [make, f"mount --bind {source_text} {at}"]
    return [*lines, f"mount -o remount,bind,ro {at}"] if read_only else lines


class Running:
    """A container that was started. `output` is what it wrote so far."""

    def __init__(self, host: Host, container: Container) -> None:
        self.container = container
        self.output: list[str] = []
        self._host = host
        root = host.folder / "roots" / container.name
        root.mkdir(parents=True, exist_ok=True)
        script = f'ROOT={shlex.quote(str(root))}\n{host.root_script(container)}\nexec chroot $ROOT "$@"'
        own = (*host.prefix(), "unshare", "--mount", "--propagation", "private", "--", "sh", "-euc", script, "sh")
        self.process = subprocess.Popen(
            [*own, *self._as_user(container.image.folder, container.command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={"PATH": os.environ["PATH"]},
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _as_user(self, folder: str, command: tuple[str, ...]) -> tuple[str, ...]:
        container = self.container
        uid, gid = container.user.split(":")
        groups = f"--groups={container.groups}" if container.groups else "--clear-groups"
        environment = {"HOME": "/var/lib/millstream" if uid == "10001" else "/", "HOSTNAME": container.name}
        environment |= container.image.environment | dict(container.environment)
        variables = [f"{name}={value}" for name, value in environment.items()]
        # The processes end with this one, even if a test is killed.
        user = ("setpriv", f"--reuid={uid}", f"--regid={gid}", groups, *NO_RIGHTS, "--pdeathsig=KILL", "--")
        return (*user, "env", "-i", f"--chdir={folder}", *variables, *command)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.output.append(line.rstrip("\n"))

    def run(self, *command: str, timeout_s: float = RUN_S_MAX) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as `docker exec` does."""
        inside = ["nsenter", f"--target={self.process.pid}", "--mount", "--net", "--root", "--"]
        return subprocess.run(
            [*inside, *self._as_user(self.container.image.folder, command)],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def healthy(self) -> bool:
        """Run the health check. Raises AssertionError if the container has ended."""
        assert self.process.poll() is None, f"{self.container.name} ended:\n" + "\n".join(self.output)
        return self.run(*self.container.health).returncode == 0

    def wait_until_healthy(self) -> None:
        wait_until(self.healthy, what=f"{self.container.name} is healthy")

    def stop(self, timeout_s: float = STOP_S_MAX) -> int:
        """Send SIGTERM, as an engine does; return the exit code."""
        self.process.terminate()
        code = self.process.wait(timeout_s)
        self._listener.join(timeout_s)
        return code

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_S_MAX)
        self._listener.join(STOP_S_MAX)
