"""log_levels: the document of log levels that the processes of a machine follow (services/process/log_level.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from millstream.gateway.catalog.shared_settings import SharedDocument
from millstream.services.process.log_level import KINDS, LEVELS


class SharedLogLevels:
    """Reads and changes the levels.

    Args:
        document: the levels by kind of process.
        changed: called after a change by this gateway.
    """

    def __init__(self, document: SharedDocument, changed: Callable[[], None]) -> None:
        self._document = document
        self._changed = changed

    def read(self) -> dict[str, Any]:
        """Return the levels by kind; kinds without one are left out."""
        content = self._document.read()
        return {kind: content[kind] for kind in KINDS if str(content.get(kind)) in LEVELS}

    def update(self, changes: Mapping[str, str | None]) -> dict[str, Any]:
        """Change the levels of some kinds, None: to the default; return all.

        Raises Failure: Locked, STORAGE.
        """

        def change(content: dict[str, Any]) -> None:
            for kind, level in changes.items():
                if level is None:
                    content.pop(kind, None)
                else:
                    content[kind] = level

        self._document.update(change)
        self._changed()
        return self.read()
