"""Runs an HTTP server over a handler that the test answers: the fast path, or the ASGI route on plain uvicorn."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from millstream.gateway.app import build_app
from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.fast_path import ConnectionContext, fast_path_protocol
from millstream.services.segments.shared_buffers import SharedBuffers
from tests.kit.application import Application
from tests.kit.asgi_protocol import asgi_protocol
from tests.kit.handlers import Held
from tests.kit.wire import Served, serving


class Front(NamedTuple):
    """A server, its handler and its budgets."""

    served: Served
    held: Held
    receive_budget: ReceiveBudget
    reply_budget: ReplyBudget

    @property
    def port(self) -> int:
        return self.served.port

    @property
    def protocol(self) -> Any:
        """The protocol object of the only open connection."""
        (protocol,) = self.served.connections
        return protocol


@asynccontextmanager
async def fronting(
    home: Path,
    *,
    fast: bool = True,
    body_bytes_max: int = 1 << 24,
    connections_max: int = 100,
    client_stall_s_max: float = 60.0,
    inbound_bytes_max: int = 1 << 26,
    unread_bytes_max: int = 1 << 30,
    drain: Drain | None = None,
    shared_buffers: SharedBuffers | None = None,
    **config: Any,
) -> AsyncIterator[Front]:
    """Yield a server; at the end, assert that nothing is left of any request. `config` is passed to `serving`."""
    drain = drain or Drain()
    held, receive_budget, reply_budget = Held(), ReceiveBudget(inbound_bytes_max), ReplyBudget(unread_bytes_max)
    application = Application(home, request_bytes_max=body_bytes_max)
    app = build_app(dataclasses.replace(application.app.state.deps, infer=held))
    lane: Any = (
        fast_path_protocol(
            held,
            body_bytes_max,
            connections_max,
            receive_budget,
            reply_budget,
            client_stall_s_max,
            ConnectionContext(drain, shared_buffers=shared_buffers),
        )
        if fast
        else asgi_protocol(drain, connections_max, client_stall_s_max)
    )
    async with serving(app, lane, **config) as served:
        yield Front(served, held, receive_budget, reply_budget)
        await served.settled(0)
        assert not served.server.server_state.tasks
        assert receive_budget.bytes == reply_budget.bytes == 0
        assert held.empty
