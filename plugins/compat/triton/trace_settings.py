"""Parses trace settings that a client may set. Pure.

Source: Triton's trace extension, "Trace Setting".
"""

from __future__ import annotations

from typing import Any

from millstream.services.errors import Code, Failure, invalid

TraceValues = dict[str, str | list[str]]

DEFAULTS: TraceValues = {"trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0"}
_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_LEAST = {"trace_rate": 1, "trace_count": -1, "log_frequency": 0}
_NUMBER_MAX = 1 << 62
_SHOWN_CHARACTERS_MAX = 200


def parsed(name: str, value: Any) -> str | list[str]:
    """Return a value in its stored form. A list of one value counts as the value, because gRPC sends lists.

    Raises Failure: INVALID, UNSUPPORTED (settings that clients cannot change).
    """
    if name == "trace_file":
        raise Failure(Code.UNSUPPORTED, "trace file location can not be updated through network protocol")
    if name == "trace_mode":
        raise Failure(Code.UNSUPPORTED, "trace mode can not be updated through network protocol")
    if name == "trace_level":
        return _levels(value if isinstance(value, list) else [value])
    if name not in _LEAST:
        raise invalid(f"unknown trace setting '{_shown(name)}'; known: {', '.join(DEFAULTS)}")
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    least = _LEAST[name]
    if isinstance(text, bool) or not isinstance(text, (str, int)) or not str(text).removeprefix("-").isdecimal():
        raise invalid(f"trace setting '{name}' must be a number, got: {_shown(value)}")
    if len(str(text)) > len(str(_NUMBER_MAX)) or not least <= int(text) <= _NUMBER_MAX:
        raise invalid(f"trace setting '{name}' must be at least {least} and at most {_NUMBER_MAX}")
    return str(int(text))


def _levels(values: list[Any]) -> list[str]:
    levels = [str(value) for value in values]
    if wrong := [level for level in levels if level not in _LEVELS]:
        raise invalid(f"unknown trace level '{_shown(wrong[0])}'; known: {', '.join(_LEVELS)}")
    if not levels or ("OFF" in levels and len(set(levels)) > 1):
        raise invalid("trace_level is OFF alone, or one or more of the others")
    return list(dict.fromkeys(levels))


def _shown(value: object) -> str:
    return str(value)[:_SHOWN_CHARACTERS_MAX]
