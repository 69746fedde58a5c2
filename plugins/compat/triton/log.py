"""Log settings, which clients change at run time for all gateways of the machine.

POST /v2/logging (REST), LogSettings (gRPC) ─> update ─> shared document ─> levels and format of every gateway's log
Source: Triton's logging extension.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millstream.gateway.catalog.snapshot import name_excerpt
from millstream.plugins.compat.triton.shared_settings import SharedDocument
from millstream.services.errors import Code, Failure, invalid
from millstream.services.process.audit import audit
from millstream.services.process.logs import JsonFormatter, TextFormatter

LogValues = dict[str, str | int | bool]

FORMATS = ("default", "ISO8601")
VERBOSE_MAX = (1 << 32) - 1
_DEFAULTS: LogValues = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}
_SWITCHES = {logging.INFO: "log_info", logging.WARNING: "log_warning", logging.ERROR: "log_error"}


class SharedLogSettings:
    """The log settings of one gateway.

    From verbose level 1 on, Millstream's debug messages are logged, too.

    Args:
        document: the settings that clients changed.
        set_verbose: has debug messages logged.
    """

    def __init__(self, document: SharedDocument, set_verbose: Callable[[bool], None]) -> None:
        self.document = document
        self._handlers: Sequence[logging.Handler] = ()
        self._set_verbose = set_verbose
        self._level_filter = _LevelFilter()

    def start(self, handlers: Sequence[logging.Handler]) -> None:
        """Apply the settings to `handlers`."""
        self._handlers = handlers
        for handler in handlers:
            handler.addFilter(self._level_filter)
        self.apply()

    def get(self) -> LogValues:
        """Return log_file, log_info, log_warning, log_error, log_verbose_level and log_format."""
        if self.document.changed():
            self.apply()
        return _DEFAULTS | self.document.read()

    def update(self, values: Mapping[str, Any]) -> LogValues:
        """Change some settings, and return all. Raises Failure: UNSUPPORTED for log_file, INVALID for unknown ones."""
        new = {name: _parsed(name, value) for name, value in values.items()}
        if new:
            self.document.update(lambda content: content.update(new))
            self.apply()
            audit("log settings changed", None, **new)
        return self.get()

    def apply(self) -> None:
        """Apply the document after a change, by this gateway or another."""
        values = _DEFAULTS | self.document.read()
        self._level_filter.hidden = {level for level, name in _SWITCHES.items() if not values[name]}
        self._set_verbose(bool(values["log_verbose_level"]))
        formatter = TextFormatter(iso8601=values["log_format"] == "ISO8601")
        for handler in self._handlers:
            if not isinstance(handler.formatter, JsonFormatter):  # its times are in ISO 8601 anyway
                handler.setFormatter(formatter)

    def stop(self) -> None:
        """Remove the filter from the handlers."""
        for handler in self._handlers:
            handler.removeFilter(self._level_filter)


class _LevelFilter(logging.Filter):
    """Drops records of hidden levels. Levels above ERROR count as ERROR."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: set[int] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        return min(record.levelno, logging.ERROR) not in self.hidden


def _parsed(name: str, value: Any) -> str | int | bool:
    if name == "log_file":
        raise Failure(Code.UNSUPPORTED, "log file location can not be updated through network protocol")
    if name in _SWITCHES.values():
        if not isinstance(value, bool):
            raise invalid(f"log setting '{name}' must be true or false")
        return value
    if name == "log_verbose_level":
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= VERBOSE_MAX:
            raise invalid(f"log setting '{name}' must be an integer, at least 0")
        return value
    if name == "log_format":
        if value not in FORMATS:
            raise invalid(f"invalid argument for --log_format, got: {name_excerpt(str(value))}")
        return str(value)
    raise invalid(f"unknown log setting '{name_excerpt(name)}'; known: {', '.join(_DEFAULTS)}")
