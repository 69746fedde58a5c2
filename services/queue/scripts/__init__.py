"""The Lua scripts that move batches, loaded from the files beside this one.

`_prelude.lua` is put before each script that uses it: Redis scripts cannot call one another.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

from millstream.services.queue.keys import PoolKeys


class Script(NamedTuple):
    """A script's text and the SHA-1 by which Redis knows it (EVALSHA)."""

    name: str
    text: bytes
    sha: bytes


#: How often a batch may be leased by workers that fell silent. A worker's death does not count: its supervisor reports it.
ATTEMPTS_MAX = 6
#: Scripts that touch none of what the prelude names.
_WITHOUT_PRELUDE = frozenset({"beat", "blame"})


@cache
def script(name: str) -> Script:
    """Return the script `name`: put, next, add_lanes, remove_lane, recover, pass_on, beat, reclaim, give_back, …"""
    folder = files(__package__)
    text = folder.joinpath(f"{name}.lua").read_bytes()
    if name not in _WITHOUT_PRELUDE:
        text = folder.joinpath("_prelude.lua").read_bytes() + text
    return Script(name, text, sha1(text, usedforsecurity=False).hexdigest().encode())


def script_call(
    name: str, keys: PoolKeys, own_keys: tuple[bytes, ...], *arguments: bytes | str | int
) -> tuple[bytes | str | int, ...]:
    """Return the EVALSHA command that calls a script with the prelude.

    `own_keys` are its KEYS after those of the prelude, `arguments` its ARGV after the prefix.
    """
    count = len(keys.scheduling) + len(own_keys)
    return ("EVALSHA", script(name).sha, count, *keys.scheduling, *own_keys, keys.prefix, *arguments)
