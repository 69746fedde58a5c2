"""The Lua scripts that move batches, loaded from the files beside this one.

Redis scripts cannot call one another: what they share, in `_prelude.lua`, is put before each script that uses it.
"""

from __future__ import annotations

import re
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


#: How often a batch may be leased by workers that fall silent. Deaths do not count: supervisors report them at once.
ATTEMPTS_MAX = 6
#: Scripts that touch none of what the prelude names.
_WITHOUT_PRELUDE = frozenset({"beat", "blame", "lead", "step_down", "store_instances"})
_FUNCTION = re.compile(r"^local function ", re.MULTILINE)


@cache
def script(name: str) -> Script:
    """Return the script `name`: put, next, add_lanes, remove_lane, recover, pass_on, beat, reclaim, give_back, …"""
    folder = files(__package__)
    text = folder.joinpath(f"{name}.lua").read_text()
    if name not in _WITHOUT_PRELUDE:
        text = _prelude(folder.joinpath("_prelude.lua").read_text(), text) + text
    data = text.encode()
    return Script(name, data, sha1(data, usedforsecurity=False).hexdigest().encode())


def _prelude(shared: str, text: str) -> str:
    """Return the names of the prelude and those of its functions that a script calls, directly or indirectly."""
    names, *functions = _FUNCTION.split(shared)
    used: list[str] = []
    for function in reversed(functions):  # a function calls only functions above it
        name = function.partition("(")[0]
        if re.search(rf"\b{name}\(", "".join((text, *used))):
            used.insert(0, f"local function {function}")
    return names + "".join(used)


def script_call(
    name: str, keys: PoolKeys, own_keys: tuple[bytes, ...], *arguments: bytes | str | int
) -> tuple[bytes | str | int, ...]:
    """Return the EVALSHA command that calls a script with the prelude.

    `own_keys` are its KEYS after those of the prelude, `arguments` its ARGV after the prefix.
    """
    count = len(keys.scheduling) + len(own_keys)
    return ("EVALSHA", script(name).sha, count, *keys.scheduling, *own_keys, keys.prefix, *arguments)
