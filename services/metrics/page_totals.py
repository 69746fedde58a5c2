"""The totals that a page shows: of all processes of a folder, with a bounded number of models.

    page:   shared lock, Shares from the file, totals, fold        (a page and a choice never overlap)
    choice: exclusive lock, totals, choose --rename--> `shares`    (once a minute, by the process that answers a scrape)

No page waits for a lock, since a frozen process may hold it: such a page is made without the lock.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from millstream.services.metrics.label_limit import (
    CHOOSE_S,
    Exists,
    Shares,
    all_exist,
    choose,
    exact,
    existing,
    fold,
    models_of,
)
from millstream.services.metrics.record import Totals

log = logging.getLogger("millstream.metrics")

#: models with series of their own, unless a setting says otherwise
MODELS_MAX = 200
_SHARES, _LOCK = "shares", "shares.lock"


class PageTotals:
    """Reads the totals of a page.

    Args:
        directory: the folder of the metric files; None: of this process alone.
        totals: reads the totals of all series.
        models_max: models with series of their own; the others share the label value `other`.
        clock: returns seconds since the epoch, on which the processes of a machine agree.
    """

    def __init__(
        self,
        directory: Path | None,
        totals: Callable[[], Totals],
        models_max: int = MODELS_MAX,
        clock: Callable[[], float] = time.time,  # noqa: TID251 - of one machine
    ) -> None:
        self._directory = directory
        self._totals = totals
        self._models_max = models_max
        self._clock = clock
        self._shares: Shares | None = None
        self._stamp: tuple[int, int] | None = None  # of the file that `_shares` was read from

    def read(self, exists: Exists = all_exist) -> tuple[Totals, frozenset[str] | None]:
        """Return the totals, and the models with series of their own; None: all. Raises OSError.

        `exists`: says which versions were deleted, whose series are not shown any more.
        """
        with self._locked(fcntl.LOCK_SH):
            shares, totals = self._load(), exact(self._totals())
        if self._is_due(shares, totals, exists):
            with self._locked(fcntl.LOCK_EX) as alone:
                if alone:
                    shares, totals = self._load(), exact(self._totals())
                    if self._is_due(shares, totals, exists):  # no other process was faster
                        shares = choose(totals, shares, self._models_max, self._clock(), exists)
                        self._store(shares)
        if shares is None:
            return existing(totals, exists), None
        return fold(totals, shares, exists), shares.shown

    def _is_due(self, shares: Shares | None, totals: Totals, exists: Exists) -> bool:
        if shares is None:
            return len(models_of(existing(totals, exists))) > self._models_max
        return abs(self._clock() - shares.at) >= CHOOSE_S or len(shares.shown) > self._models_max

    def _load(self) -> Shares | None:
        if self._directory is None:
            return self._shares
        path = self._directory / _SHARES
        try:
            about = path.stat()
            stamp = about.st_ino, about.st_mtime_ns
            if stamp != self._stamp:
                self._shares, self._stamp = Shares.parse(json.loads(path.read_bytes())), stamp
        except FileNotFoundError:
            self._shares, self._stamp = None, None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read, and the busiest models are chosen anew: %s", path, error)
            self._shares, self._stamp = None, None
        return self._shares

    def _store(self, shares: Shares) -> None:
        """Store the shares for all processes; on a full disk the page goes on as before."""
        self._shares = shares
        if self._directory is None:
            return
        new = self._directory / f"{_SHARES}.{secrets.token_hex(4)}.part"
        try:
            new.write_text(json.dumps(shares.document(), separators=(",", ":")))
            about = new.stat()
            new.rename(self._directory / _SHARES)
            self._stamp = about.st_ino, about.st_mtime_ns
        except OSError as error:
            log.warning("the busiest models cannot be stored: %s", error)
            with suppress(OSError):
                new.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, kind: int) -> Iterator[bool]:
        """Yield whether this process got the lock; never waits."""
        if self._directory is None:
            yield True
            return
        descriptor = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            got = False
        else:
            got = True
        try:
            yield got
        finally:
            os.close(descriptor)
