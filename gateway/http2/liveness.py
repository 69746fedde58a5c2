"""liveness: how long a client may be silent: before the preface, within a frame, and between frames.

Source: RFC 9113, sections 6.5.3 (SETTINGS_TIMEOUT) and 6.7 (PING).
"""

from __future__ import annotations

from millstream.gateway.http2.faults import ConnectionFault, ErrorCode
from millstream.gateway.http2.limits import Limits

#: payloads of our PING frames
KEEPALIVE_PING = b"liveness"
DRAIN_PING = b"draining"


class Liveness:
    """The clocks of one connection.

    Args:
        limits: the limits of the connection.
        now: the current instant, in seconds.
    """

    __slots__ = (
        "_began",
        "_limits",
        "_partial_since",
        "_pinged",
        "_received",
        "preface_received",
        "settings_acknowledged",
    )

    def __init__(self, limits: Limits, now: float) -> None:
        self.preface_received = False
        self.settings_acknowledged = False
        self._limits = limits
        self._began = self._received = now
        self._pinged: float | None = None
        self._partial_since: float | None = None

    def received(self, now: float, *, complete: bool, partial: bool) -> None:
        """Note that bytes came.

        Args:
            now: the current instant.
            complete: whether a frame is complete with them.
            partial: whether a frame or header block is incomplete after them.
        """
        self._received = now
        self._pinged = None
        if not partial:
            self._partial_since = None
        elif complete or self._partial_since is None:
            self._partial_since = now

    def check(self, now: float, *, partial: bool) -> bool:
        """Return whether a PING is due. Raises ConnectionFault if the client was silent for too long."""
        limits = self._limits
        if not self.preface_received and now >= self._began + limits.preface_s_max:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no preface came")
        if not self.settings_acknowledged and now >= self._began + limits.settings_ack_s_max:
            raise ConnectionFault(ErrorCode.SETTINGS_TIMEOUT, "SETTINGS are not acknowledged")
        if partial and self._partial_since is not None and now >= self._partial_since + limits.frame_s_max:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a frame or header block does not end")
        if self._pinged is not None:
            if now >= self._pinged + limits.keepalive_timeout_s:
                raise ConnectionFault(ErrorCode.NO_ERROR, "PING is not answered")
            return False
        if now < self._received + limits.keepalive_s:
            return False
        self._pinged = now
        return True
