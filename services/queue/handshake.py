"""The first commands on a new Redis connection: log in, select the database, check for a master. Pure."""

from __future__ import annotations

from typing import Any

from millstream.services.errors import Code, Failure
from millstream.services.queue.sentinel import NOT_A_MASTER, is_master
from millstream.services.queue.url import RedisAddress

_ROLE = ("ROLE",)


def handshake_commands(address: RedisAddress) -> list[tuple[str, ...]]:
    """Return the commands to send, in order, before any other. A new connection speaks RESP2 and keeps it."""
    commands: list[tuple[str, ...]] = []
    if address.password is not None:
        user = (address.username,) if address.username else ()
        commands.append(("AUTH", *user, address.password))
    if address.db:
        commands.append(("SELECT", str(address.db)))
    if address.sentinels is not None:
        commands.append(_ROLE)
    return commands


def check_reply(words: tuple[str, ...], reply: Any) -> None:
    """Check the reply to a command of `handshake_commands`.

    Raises Failure(UNAVAILABLE) if the sentinels named this server as the master, but it is not one.
    """
    if words == _ROLE and not is_master(reply):
        raise Failure(Code.UNAVAILABLE, NOT_A_MASTER, retry_after_s=1)
