"""The inference libraries that can serve, by name; a library is imported when its first model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millstream.services.errors import invalid
from millstream.workers.backends.base import Backend
from millstream.workers.backends.echo import Echo
from millstream.workers.backends.onnxruntime import OnnxRuntime

_BACKENDS: dict[str, Callable[[Path | None], Backend]] = {"onnxruntime": OnnxRuntime, "echo": lambda _: Echo()}


def get_backend(name: str, home: Path | None = None) -> Backend:
    """The backend called `name`. `home`: where it may keep files. Raises Failure(INVALID) for a name that is not known."""
    if name not in _BACKENDS:
        raise invalid(f"unknown backend {name!r}; known: {', '.join(sorted(_BACKENDS))}")
    return _BACKENDS[name](home)
