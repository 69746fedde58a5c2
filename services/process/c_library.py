"""The functions of the C library."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def c_library() -> ctypes.CDLL:
    """Return the C library of this process; its calls set `ctypes.get_errno()`. Loaded once: it costs 50 us."""
    return ctypes.CDLL(None, use_errno=True)
