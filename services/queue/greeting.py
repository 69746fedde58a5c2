"""The first commands on a new Redis connection of our own: who we are and which database. Pure."""

from __future__ import annotations

from services.queue.url import RedisAddress


def greeting(address: RedisAddress) -> list[tuple[str, ...]]:
    """Commands to send, in order, before any other. RESP2 is the default of a fresh connection and stays."""
    commands: list[tuple[str, ...]] = []
    if address.password is not None:
        user = (address.username,) if address.username else ()
        commands.append(("AUTH", *user, address.password))
    if address.db:
        commands.append(("SELECT", str(address.db)))
    return commands
