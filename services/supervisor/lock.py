"""What a supervisor holds while it runs, and the kernel frees at its end: its home, and the name of this host."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import platform
import socket
from pathlib import Path

from millstream.client.address import CERTIFICATE
from millstream.services.errors import Code, Failure


class HomeLock:
    """`<home>/run/lock`, held from `take` until `release` or the end of the process."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "lock"
        self._url_path = run_dir / "url"
        self._certificate_path = run_dir / CERTIFICATE
        self._fd = -1

    def take(self) -> None:
        """Take the lock. Raises Failure(CONFLICT) with the holder's pid and URL if another process holds it."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = read_holder(self._path.parent)
            self._close()
            raise Failure(
                Code.CONFLICT,
                f"millstream is already running in {self._path.parent.parent} (pid {holder.get('pid', 'unknown')}, "
                f"{holder.get('url') or 'no gateway yet'}): stop it first, or use another --home",
            ) from error
        self.announce(None)

    def announce(self, url: str | None, control: Path | None = None, certificate: Path | None = None) -> None:
        """Write the holder's pid and, once known, its URL and control socket into the lock file.

        Also writes the URL to `<home>/run/url`, which the command line tools read, and beside it a link to the
        server's certificate, which they trust.
        """
        document = json.dumps({"pid": os.getpid(), "url": url, "control": control and str(control)}).encode()
        # The lock works without this text: an installation must also start and serve on a full disk.
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, document, 0)
            os.ftruncate(self._fd, len(document))
        if url is not None:
            self._certificate_path.unlink(missing_ok=True)
            if certificate is not None:
                with contextlib.suppress(OSError):
                    self._certificate_path.symlink_to(certificate)
            try:
                self._url_path.write_text(url + "\n")
            except OSError:
                self._url_path.unlink(missing_ok=True)

    def release(self) -> None:
        # The lock file itself stays: removing it while another process is about to lock it would break the lock.
        self._url_path.unlink(missing_ok=True)
        self._certificate_path.unlink(missing_ok=True)
        os.ftruncate(self._fd, 0)
        self._close()

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1


def read_holder(run_dir: Path) -> dict[str, object]:
    """Return what the holder of a home's lock wrote: pid, url, control. Empty if there is none.

    The holder may have ended since.
    """
    with contextlib.suppress(OSError, ValueError):
        document = json.loads((run_dir / "lock").read_bytes())
        if isinstance(document, dict):
            return document
    return {}


class HostName:
    """The name by which the workers of one supervisor are told from those of the installation's other hosts.

    It is the name of this host; a second supervisor of the installation on it gets HOST.2, and so on.
    """

    def __init__(self) -> None:
        self._claim: socket.socket | None = None  # keeps the name from others, until this process ends

    def take(self, installation: str) -> str:
        """Return the name, which is kept until `release`."""
        host = platform.node() or "localhost"
        for number in itertools.count(1):
            self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._claim.bind(f"\0{installation}.host.{number}")  # in no file system: nothing is left behind
            except OSError as error:
                self._claim.close()
                if error.errno == errno.EADDRINUSE:
                    continue
            return host if number == 1 else f"{host}.{number}"
        raise AssertionError

    def release(self) -> None:
        if self._claim is not None:
            self._claim.close()
