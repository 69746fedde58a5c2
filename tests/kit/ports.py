"""A free TCP port for a program that cannot choose one by itself."""

from __future__ import annotations

import random
import socket

#: Below the ports that Linux gives to the connections of clients (net.ipv4.ip_local_port_range): tests open thousands,
#: and one of them would take the port before the program does.
_FIRST, _LAST = 15_000, 31_999


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nobody listens."""
    for port in random.sample(range(_FIRST, _LAST + 1), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"none of a hundred ports between {_FIRST} and {_LAST} is free")
