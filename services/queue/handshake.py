"""The first commands on a new Redis connection of our own: who we are, which database, whether it is a master. Pure."""

from __future__ import annotations

from typing import Any

from millstream.services.errors import Code, Failure
from millstream.services.queue.sentinel import is_master
from millstream.services.queue.url import RedisAddress

_ROLE = ("ROLE",)


def greeting(address: RedisAddress) -> list[tuple[str, ...]]:
    """Commands to send, in order, before any other. RESP2 is the default of a fresh connection and stays."""
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
    """What came back for a command of `greeting`. Raises Failure(UNAVAILABLE) if it is not the master that it was named."""
    if words == _ROLE and not is_master(reply):
        raise Failure(
            Code.UNAVAILABLE, "the server that the sentinels name is not a master (any more)", retry_after_s=1
        )
