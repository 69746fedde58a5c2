"""The backends by name; an inference library is imported when its first model is loaded."""

from __future__ import annotations

from pathlib import Path

from millstream.services.errors import invalid
from millstream.services.extras import backends
from millstream.services.placement.pools import CPU
from millstream.services.plugin.registry import load_for
from millstream.workers.backends.base import Backend


def get_backend(name: str, home: Path | None = None) -> Backend:
    """Return the backend called `name`, which may keep files in `home`. Raises Failure(INVALID) for an unknown name."""
    known = backends()
    if name not in known:
        raise invalid(f"unknown backend {name!r}; known: {', '.join(sorted(known))}")
    backend: Backend = load_for(known[name], known[name].factory)(home)
    return backend


def backends_beside(name: str, device: str, home: Path | None = None) -> tuple[Backend, ...]:
    """Return the backends that a worker of the backend `name` has, too: their instances live in other processes."""
    if device != CPU:
        return ()
    return tuple(get_backend(one.name, home) for one in backends().values() if one.beside and one.name != name)
