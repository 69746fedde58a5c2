"""Makes the import of a backend's library one step: it succeeds, or it can be tried again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def whole_import(*packages: str) -> Iterator[None]:
    """Import `packages` in the block; if that fails, forget those of their modules that it had imported.

    An import may fail for want of memory, half way. Python forgets the package alone: the next attempt would find its
    modules imported, which are then not attributes of the new package, and every later load in this process would fail.
    """
    before = set(sys.modules)
    try:
        yield
    except BaseException:
        for name in sys.modules.keys() - before:
            if name.partition(".")[0] in packages:
                del sys.modules[name]
        raise
