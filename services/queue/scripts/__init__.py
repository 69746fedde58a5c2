"""The Lua scripts of the exchange, loaded from the files beside this one.

`_prelude.lua`, what they share, stands before each that uses it: Redis scripts cannot call one another.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple


class Script(NamedTuple):
    """A script's text and the SHA-1 by which Redis knows it (EVALSHA)."""

    name: str
    text: bytes
    sha: bytes


#: leases of one batch by silent workers, in all; of a worker that died its supervisor says so at once
ATTEMPTS_MAX = 6
_WITH_PRELUDE = frozenset({"put", "next", "hold", "release", "reclaim", "give_back", "blame", "withdraw"})


@cache
def script(name: str) -> Script:
    """The script `name` (put, next, hold, release, recover, pass_on, beat, reclaim, give_back, blame, withdraw)."""
    folder = files(__package__)
    text = folder.joinpath(f"{name}.lua").read_bytes()
    if name in _WITH_PRELUDE:
        text = folder.joinpath("_prelude.lua").read_bytes() + text
    return Script(name, text, sha1(text, usedforsecurity=False).hexdigest().encode())
