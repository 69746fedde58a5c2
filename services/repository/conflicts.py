"""Read, decide, compare-and-set; once more when another process wrote in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from millstream.services.errors import Code, Failure

TRIES_MAX = 100  # then the caller gets the CONFLICT; each failed try means that another process succeeded
Written = TypeVar("Written")


def retry_on_conflict(change: Callable[[], Written]) -> Written:
    """Call `change` until it raises no Failure(CONFLICT), at most TRIES_MAX times, and return its result.

    Args:
        change: reads, decides and writes; it reads again at each call.

    Raises:
        Failure: what `change` raises; CONFLICT if its last try met a conflict, too.
    """
    for _ in range(TRIES_MAX - 1):
        try:
            return change()
        except Failure as failure:
            if failure.code is not Code.CONFLICT:
                raise
    return change()
