"""The level of a process' own log records, changed while it runs.

PUT /admin/v1/log-level ─> Redis ─> every process of the installation ───────────┐ within CHECK_S
SIGUSR2 of the supervisor ─> run/log-levels.json ─> every process of the machine ┤ within CHECK_S
kill -USR2 PID ─> debug, and back ───────────────────────────────────────────────┴─> "millstream"
A process that does not reach Redis keeps the level that it read last.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from millstream.services.errors import Failure

log = logging.getLogger("millstream.process")

CHECK_S = 2.0  # delay until a process follows a change
KINDS = ("gateway", "worker", "controller")
LEVELS = {
    name.lower(): number
    for name, number in logging.getLevelNamesMapping().items()
    if name in {"DEBUG", "INFO", "WARNING", "ERROR"}
}


def toggle_debug(path: Path) -> str:
    """Set the level of all processes to debug in the document, or reset it; return what was done. Raises OSError."""
    on = not _document(path)
    if on:
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(dict.fromkeys(KINDS, "debug")))
        temporary.rename(path)
    else:
        path.unlink(missing_ok=True)
    return "debug" if on else "the default"


class LogLevel:
    """The level of this process.

    In falling priority: the signal, the machine's document, the installation's level, Triton's verbose level, info.

    Args:
        kind: one of KINDS.
        path: the machine's document: a level for each kind that has one.
        installation: returns the installation's level of the kind. Raises Failure if it is not known now.
        logger: whose level it is; one below "millstream" leaves the rest of the process alone.
    """

    def __init__(
        self, kind: str, path: Path, installation: Callable[[], str | None], logger: str = "millstream"
    ) -> None:
        self._logger = logger
        self._kind = kind
        self._path = path
        self._verbose = self._signalled = False
        self._installation = installation
        self._of_machine: str | None = None
        self._of_installation: str | None = None
        self._asked: str | None = None  # of these two
        self._seen: tuple[int, ...] = ()
        self._stopped = threading.Event()
        self._applying = threading.Lock()
        self._signals: SimpleQueue[None] = SimpleQueue()

    def start(self, *, signals: bool = True) -> None:
        """Follow the document and the installation in a thread, and SIGUSR2. Call it in the main thread."""
        threading.Thread(target=self._run, name="log level", daemon=True).start()
        if not signals:
            return
        signal.signal(signal.SIGUSR2, self._on_signal)
        threading.Thread(target=self._follow_signals, name="log level signal", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def set_verbose(self, on: bool) -> None:
        """Log debug records where nothing else says a level."""
        self._verbose = on
        self._apply()

    def check(self) -> None:
        """Follow the document and the installation's level if they changed."""
        self._read_machine()
        self._follow()  # reading the other may take seconds
        try:
            self._of_installation = self._installation()
        except Failure as failure:
            log.debug("the log level of the installation could not be read: %s", failure.message)
        self._follow()

    def _read_machine(self) -> None:
        try:
            status = self._path.stat()
            seen: tuple[int, ...] = status.st_ino, status.st_mtime_ns, status.st_size
        except OSError:
            seen = ()
        if seen == self._seen:
            return
        self._seen = seen
        asked = _document(self._path).get(self._kind)
        self._of_machine = asked if isinstance(asked, str) and asked in LEVELS else None

    def _follow(self) -> None:
        asked = self._of_machine or self._of_installation
        if asked != self._asked:
            self._asked = asked
            self._apply()
            log.warning("log level: %s", asked or "the default")

    def _apply(self) -> None:
        with self._applying:
            asked = "debug" if self._signalled or (self._asked is None and self._verbose) else self._asked
            logging.getLogger(self._logger).setLevel(logging.NOTSET if asked is None else LEVELS[asked])
            # Of libraries only what is at least an info: their debug records are not about this product.
            if self._logger == "millstream":
                logging.getLogger().setLevel(max(logging.INFO, LEVELS[asked or "info"]))

    def _on_signal(self, *_: object) -> None:
        # It may have interrupted code that holds a lock, of logging or of threading: this queue takes none.
        self._signals.put(None)

    def _follow_signals(self) -> None:
        while True:
            self._signals.get()
            self._signalled = not self._signalled
            self._apply()
            log.warning("SIGUSR2: log level: %s", "debug" if self._signalled else self._asked or "the default")

    def _run(self) -> None:
        self.check()
        while not self._stopped.wait(CHECK_S):
            self.check()


def _document(path: Path) -> dict[str, Any]:
    """Return the levels by kind; empty if there is no such file."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
