"""peer_settings: reads the payload of a SETTINGS frame. Source: RFC 9113, section 6.5."""

from __future__ import annotations

import struct

from millstream.gateway.http2.faults import ConnectionFault, ErrorCode
from millstream.gateway.http2.frames import FRAME_BYTES_MAX, Setting
from millstream.gateway.http2.windows import WINDOW_BYTES_MAX

_SETTING = struct.Struct(">HI")
_FRAME_SIZE_MAX = (1 << 24) - 1


def read_settings(payload: bytes) -> dict[int, int]:
    """Return the last value of each identifier, those of unknown identifiers included. Raises ConnectionFault."""
    if len(payload) % _SETTING.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS end within a setting")
    values: list[tuple[int, int]] = list(_SETTING.iter_unpack(payload))
    for key, value in values:
        if key == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH is neither 0 nor 1")
        if key == Setting.INITIAL_WINDOW_SIZE and value > WINDOW_BYTES_MAX:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE is too large")
        if key == Setting.MAX_FRAME_SIZE and not FRAME_BYTES_MAX <= value <= _FRAME_SIZE_MAX:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is out of its range")
    return dict(values)
