"""Small JSON documents that all gateways of a machine read and change.

update ─> lock, read, change, replace the file with one rename      when_unlocked ─> update, again while it is locked
watch ─> checks every WATCH_S whether it changed
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from millstream.services.errors import Code, Failure
from millstream.services.process.waits import next_tick
from millstream.services.repository.disk import FileLock, storage_errors, try_lock

log = logging.getLogger("millstream.settings")

WATCH_S = 0.5
LOCK_S_MAX = 5.0  # a call waits this long for the lock of a document, and is refused then
LOCK_PAUSE_S = 0.005
UNLOCKED_PAUSE_S = 0.05  # between tries in the event loop
T = TypeVar("T")


class Locked(Failure):
    """Another process changes the document, or was paused while it did."""

    def __init__(self) -> None:
        super().__init__(
            Code.UNAVAILABLE,
            "another gateway of this machine is changing these settings: try again; if that goes on, a gateway is "
            "paused or hangs: continue or restart it",
            retry_after_s=1,
        )


class SharedDocument:
    """A JSON object in the file `path`. A missing file, or one that is not a JSON object, is an empty document."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loaded_signature: tuple[int, ...] = (-1,)
        self._content: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Return the document: the same object as last time if it did not change."""
        signature = self._signature()
        if signature != self._loaded_signature:
            self._loaded_signature, self._content = signature, self._load()
        return self._content

    def changed(self) -> bool:
        """Whether `read` would return another document than last time. Costs one stat."""
        return self._signature() != self._loaded_signature

    def update(self, change: Callable[[dict[str, Any]], T], wait_s: float = 0.0) -> T:
        """Let `change` alter the document in place, and return its result.

        Args:
            change: alters the document.
            wait_s: how long to block for the lock; calls of clients use `when_unlocked` instead.

        Raises:
            Failure: Locked, STORAGE, and whatever `change` raises.
        """
        with storage_errors(self._path.parent):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = self._lock(wait_s)
            try:
                content = self._load()
                result = change(content)
                new = self._path.with_suffix(f".{os.getpid()}.new")
                new.write_text(json.dumps(content))
                self._advance_mtime(new)
                new.rename(self._path)
                self._loaded_signature, self._content = self._signature(), content
            finally:
                lock.release()
        return result

    def _lock(self, wait_s: float) -> FileLock:
        until = time.monotonic() + wait_s
        while True:
            lock = try_lock(self._path.with_suffix(".lock"))
            if lock is not None:
                return lock
            if time.monotonic() >= until:
                raise Locked
            time.sleep(LOCK_PAUSE_S)

    def _advance_mtime(self, new: Path) -> None:
        """Make the mtime later than that of the replaced file: clocks are coarse, and inode numbers are reused."""
        try:
            before = self._path.stat().st_mtime_ns
        except OSError:
            return
        status = new.stat()
        if status.st_mtime_ns <= before:
            os.utime(new, ns=(status.st_atime_ns, before + 1))

    def _signature(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _load(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}


async def when_unlocked(update: Callable[[], T]) -> T:
    """Return the result of `update`, called again for LOCK_S_MAX while the document that it changes is locked.

    Raises Failure: Locked, and whatever `update` raises.
    """
    until = time.monotonic() + LOCK_S_MAX
    while True:
        try:
            return update()
        except Locked:
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(UNLOCKED_PAUSE_S)


async def watch(documents: Mapping[SharedDocument, Callable[[], None]], every: Callable[[], object]) -> None:
    """Every WATCH_S, call the functions of documents that other gateways changed, then `every`, until cancelled."""
    while True:
        await next_tick(WATCH_S)
        try:
            for document, apply in documents.items():
                if document.changed():
                    apply()
            every()
        except Exception:
            log.exception("shared settings could not be applied")
