"""limits: what one client may make a connection do.

A client that exceeds a limit gets GOAWAY with ENHANCE_YOUR_CALM, unless the limit says otherwise.
Source: RFC 9113, section 10.5.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The limits of a connection. The defaults are those of a server; tests use smaller ones."""

    #: streams whose call has not ended; a further one gets REFUSED_STREAM, and the client sends it again later
    streams_max: int = 1024
    #: bytes that a client may send of a stream, and of all streams, before the server has consumed them
    stream_window_bytes: int = 1024 * 1024
    connection_window_bytes: int = 4 * 1024 * 1024
    #: payload of DATA, which is passed on as it arrives, so that long frames take no memory; and of other frames
    frame_bytes_max: int = 1024 * 1024
    header_frame_bytes_max: int = 64 * 1024
    #: names, values and 32 bytes for each field; the call is refused beyond (RFC 9113, section 6.5.2)
    header_list_bytes_max: int = 16 * 1024
    #: the same, beyond which the connection ends: a block of 4 KiB can stand for 16 MB (header bomb)
    header_bomb_bytes: int = 64 * 1024
    #: a header block as sent
    header_block_bytes_max: int = 32 * 1024
    #: the account of frames that are no work (gateway/http2/account.py): its first balance, for what
    #: `streams_max` calls may need before one of them is answered; and what each second adds, up to that balance
    account: int = 16 * 1024
    account_per_s: float = 32 * 1024
    #: seconds until the preface, and until SETTINGS are acknowledged (SETTINGS_TIMEOUT)
    preface_s_max: float = 10.0
    settings_ack_s_max: float = 20.0
    #: seconds for which a frame or a header block may be incomplete
    frame_s_max: float = 60.0
    #: seconds without a byte received, after which a PING is sent, and for which its answer may take
    keepalive_s: float = 60.0
    keepalive_timeout_s: float = 20.0
    #: a reply may take this time and a second for each READ_RATE_MIN of it; if the client takes less than READ_RATE_MIN
    #: of all replies in this time, all that have waited so long are reset
    stall_s_max: float = 60.0


READ_RATE_MIN = 64 * 1024  # bytes a second; a client that reads as much is not slow
