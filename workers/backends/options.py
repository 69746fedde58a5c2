"""The options of a load: what a backend takes beyond its defaults, which is how a compiled form is loaded.

Names and types are checked: a library that ignored an option would serve something else than what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from millstream.services.errors import invalid

Value = str | int | float | bool
Options = Mapping[str, Value]

NO_OPTIONS: Options = MappingProxyType({})
THREADS_MAX = 1024


def check_options(backend: str, given: Options, known: Mapping[str, type]) -> None:
    """Raise Failure(INVALID) if an option is not one of `known` or has another type, or `threads` is out of range."""
    for name, value in given.items():
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise invalid(f"the backend {backend} has no option {name!r}; known: {names}")
        if type(value) is not known[name]:  # not isinstance: True is an int
            raise invalid(f"the option {name!r} of the backend {backend} is a {known[name].__name__}, not {value!r}")
    threads = given.get("threads", 1)
    if not 1 <= int(threads) <= THREADS_MAX:
        raise invalid(f"the option 'threads' is from 1 to {THREADS_MAX}, not {threads!r}")
