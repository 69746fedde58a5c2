"""stream: the state of one stream whose call has not ended.

Source: RFC 9113, section 5.1. A stream is in the connection's table while it is open or half-closed.
"""

from __future__ import annotations

from collections import deque

from millstream.gateway.http2.windows import ReceiveWindow

Piece = bytes | memoryview


class Stream:
    """One stream.

    Args:
        number: the identifier.
        send_window: bytes that the client accepts; may be negative.
        receive_window: what the client may send.
        announced_bytes: data that is still to come, by the content-length; None: the client did not say.
        opened_at: the instant at which it began, in seconds.
        ended: whether the client sends no more.
    """

    __slots__ = (
        "announced_bytes",
        "ended",
        "held_bytes",
        "number",
        "opened_at",
        "queue",
        "queued_at",
        "queued_bytes",
        "receive_window",
        "send_window",
        "trailers",
        "whole_by",
    )

    def __init__(
        self,
        number: int,
        send_window: int,
        receive_window: ReceiveWindow,
        announced_bytes: int | None,
        opened_at: float,
        *,
        ended: bool,
    ) -> None:
        self.number = number
        self.send_window = send_window
        self.receive_window = receive_window
        self.announced_bytes = announced_bytes
        self.opened_at = opened_at
        self.ended = ended
        self.held_bytes = 0  # received and not consumed
        self.queue: deque[Piece] = deque()  # data that waits for a window, or for room in the transport
        self.queued_bytes = 0
        self.trailers: bytes | None = None  # sent when the queue is empty; they end the stream
        self.queued_at = 0.0  # instant at which the queue began to wait
        self.whole_by = 0.0  # instant by which the client must have taken it
