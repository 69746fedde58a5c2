"""One `millstream up` per home: a lock that ends with its holder, and says who holds it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path

from millstream.services.errors import Code, Failure


class HomeLock:
    """`<home>/run/lock`, held from `take` to `release` or to the end of the process, however it ends."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "lock"
        self._url_path = run_dir / "url"
        self._fd = -1

    def take(self) -> None:
        """Raises Failure(CONFLICT) if another process holds it; the message names its pid and URL."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = holder_of(self._path.parent)
            self._close()
            raise Failure(
                Code.CONFLICT,
                f"millstream is already running in {self._path.parent.parent} (pid {holder.get('pid', 'unknown')}, "
                f"{holder.get('url') or 'still starting'}): stop it first, or use another --home",
            ) from error
        self.announce(None)

    def announce(self, url: str | None, control: Path | None = None) -> None:
        """Write who holds the lock and, once known, the URL and the control socket.

        `<home>/run/url` is for the command line tools.
        """
        document = json.dumps({"pid": os.getpid(), "url": url, "control": control and str(control)}).encode()
        # The lock holds whether or not it can say by whom: what is there is served from a full disk, too.
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, document, 0)
            os.ftruncate(self._fd, len(document))
        if url is not None:
            try:
                self._url_path.write_text(url + "\n")
            except OSError:
                self._url_path.unlink(missing_ok=True)

    def release(self) -> None:
        # The lock file itself stays: removing a file that others may be about to lock breaks the lock.
        self._url_path.unlink(missing_ok=True)
        os.ftruncate(self._fd, 0)
        self._close()

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1


def holder_of(run_dir: Path) -> dict[str, object]:
    """What the holder of a home's lock wrote: pid, url, control. Nothing if nobody did; it may be gone by now."""
    with contextlib.suppress(OSError, ValueError):
        document = json.loads((run_dir / "lock").read_bytes())
        if isinstance(document, dict):
            return document
    return {}
