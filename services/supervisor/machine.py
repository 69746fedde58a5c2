"""What the supervisor asks of the machine that it runs on."""

from __future__ import annotations

import errno
import itertools
import os
import platform
import socket


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal that is still open (tty(4))."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


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
