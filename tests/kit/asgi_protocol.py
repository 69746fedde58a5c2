"""uvicorn's own protocol with the bounds of the fast path: the oracle of the tests that compare the fast path with it.

All its requests go to the ASGI app, and wait for their turn as uvicorn has them wait.
"""

from __future__ import annotations

import asyncio

from millstream.gateway.connection.bounded_protocol import BoundedProtocol, too_many_connections, too_slow
from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.error_reply import error_reply
from millstream.gateway.connection.infer_handler import NO_HEADERS, InferHeaders, head
from millstream.gateway.connection.request_head import DISCARDED, head_fault
from millstream.gateway.connection.uvicorn_hooks import check_parts
from millstream.services.errors import Code, Failure
from millstream.services.process.request_id import new_request_id


class AsgiProtocol(BoundedProtocol):
    """One connection, all of whose requests go to the ASGI app."""

    _head_fault: str | None = None  # of the last request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        open_now = len(self.connections)
        if open_now > 2 * self.connections_max:
            transport.abort()  # refused connections are open until they are flushed, and even these are too many
        elif open_now > self.connections_max:
            self._refuse(too_many_connections())
        else:
            self._arm_timer()

    def data_received(self, data: bytes) -> None:
        if self._receiving:
            self._framing_bytes += len(data)
        super().data_received(data)
        if not self._receiving or self.transport.is_closing():
            return  # empty lines before a request: a client that sends no more than these idles
        fault = self._framing_fault()
        if fault is None:
            self._arm_timer()
        else:
            self.send_400_response(fault)

    def on_message_begin(self) -> None:
        self._begin_request()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        fault = head_fault(self.parser.get_http_version(), self.headers)
        if fault is not None:
            self._head_fault = fault
            raise ValueError(fault)  # uvicorn calls `send_400_response`, with a text of its own
        self._end_head()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._count_chunk()
        self.headers = DISCARDED  # trailers may follow

    def on_body(self, body: bytes) -> None:
        self._count_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._receiving = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._ending:
            self.server_state.total_requests += 1
            self.pipeline.clear()
            self._end()
            return
        super().on_response_complete()
        self._unset_keepalive_if_required()  # uvicorn's timer: it closes a connection that is receiving a request, too
        if not self.transport.is_closing():
            self._arm_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._ending and not self.transport.is_closing():
            self._end()

    def _end(self) -> None:
        """Linger after the last reply, once the client has read it up to what the kernel holds."""
        if self.flow.write_paused:
            self._timer.unset()
            self.flow.pause_reading()
            return
        self._ending = False
        self._linger(self.transport.close if not self.cycle.more_body else self.transport.abort)

    def _timed_out(self) -> None:
        cycle = self.cycle
        reply_owed = cycle is not None and not cycle.response_complete and not cycle.more_body
        if reply_owed or self.pipeline or self.flow.read_paused:
            if self._receiving:  # the client is not late: it waits for a reply, or reading is paused
                self._read_deadline = self.loop.time() + self.client_stall_s_max
                self._arm_timer()
        elif self._receiving:
            self._refuse(too_slow())
        else:
            self.timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Failure(Code.INVALID, self._head_fault or msg))

    def _refuse(self, failure: Failure) -> None:
        """Answer `failure` in place of the request that is being received, and close the connection."""
        cycle = self.cycle
        replying = cycle is not None and not cycle.response_complete
        is_of_cycle = replying or (self._receiving and self._head_complete)  # else `cycle` is an answered request
        if not (is_of_cycle and cycle.response_started):
            self.transport.write(self._refusal(failure))
        if replying:
            cycle.disconnected = True  # the app, which may be reading the body, writes nothing more
            cycle.message_event.set()
        if self.pipeline:
            self.transport.close()  # uvicorn does not know the request before these, whose app may still write
        else:
            self._linger(self.transport.abort)

    def _refusal(self, failure: Failure) -> bytes:
        reply = error_reply(failure)
        headers = self._headers_received()
        if self.cors is not None:
            reply = reply._replace(added=self.cors.lines(headers.origin))
        request_id = headers.request_id or new_request_id()
        return head(reply, self.server_state.default_headers, request_id, keep_alive=False) + reply.body

    def _headers_received(self) -> InferHeaders:
        if not self._receiving:
            return NO_HEADERS
        return InferHeaders.read(list(self.cycle.scope["headers"]) if self._head_complete else self.headers)


def asgi_protocol(drain: Drain, connections_max: int, client_stall_s_max: float = 60.0) -> type[AsgiProtocol]:
    """Return the protocol class of a server without the fast path.

    Args:
        drain: Tells whether the server is draining.
        connections_max: Open connections; more are refused, and beyond twice as many, reset.
        client_stall_s_max: Seconds that a client may be late when it sends a request or reads a reply.

    Raises:
        Failure: this version of uvicorn is not a tested one.
    """
    check_parts()
    bounds = {"drain": drain, "connections_max": connections_max, "client_stall_s_max": client_stall_s_max}
    return type("AsgiProtocol", (AsgiProtocol,), bounds)
