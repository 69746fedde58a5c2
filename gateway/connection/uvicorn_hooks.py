"""The private parts of uvicorn that the fast path overrides, calls or reads, checked at start.

uvicorn promises none of them, so pyproject bounds its version to the tested one, and a gateway with another version
that lacks a part does not start, rather than fail in the middle of requests.
"""

from __future__ import annotations

from collections.abc import Iterator

import uvicorn
from httptools import HttpRequestParser
from uvicorn.server import Server, ServerState

from millstream.services.extras import misfit

try:
    from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
except ImportError as error:
    raise misfit("uvicorn", uvicorn.__version__, [str(error)]) from error

__all__ = ["HIGH_WATER_LIMIT", "STATUS_LINE", "HttpToolsProtocol", "check_parts", "new_parser"]

#: methods that the fast path overrides or calls
_METHODS: dict[type, tuple[str, ...]] = {
    HttpToolsProtocol: (
        "connection_made",
        "connection_lost",
        "data_received",
        "pause_writing",
        "resume_writing",
        "shutdown",
        "on_message_begin",
        "on_url",
        "on_header",
        "on_headers_complete",
        "on_body",
        "on_message_complete",
        "on_response_complete",
        "send_400_response",
        "timeout_keep_alive_handler",
        "handle_websocket_upgrade",
        "_should_upgrade",
        "_start_asgi_task",
        "_unset_keepalive_if_required",
    ),
    FlowControl: ("pause_reading", "resume_reading"),
    RequestResponseCycle: ("run_asgi",),
    Server: ("startup", "shutdown"),
}
#: names that a method has to use: attributes that it sets, and hooks that it calls
_USES: dict[tuple[type, str], tuple[str, ...]] = {
    (HttpToolsProtocol, "__init__"): (
        "loop",
        "parser",
        "HttpRequestParser",
        "set_dangerous_leniencies",
        "connections",
        "server_state",
        "timeout_keep_alive",
        "timeout_keep_alive_task",
        "transport",
        "flow",
        "pipeline",
        "headers",
        "expect_100_continue",
        "cycle",
    ),
    (HttpToolsProtocol, "on_headers_complete"): ("_start_asgi_task", "on_response_complete", "pipeline", "url"),
    (HttpToolsProtocol, "connection_lost"): ("_unset_keepalive_if_required",),
    (FlowControl, "__init__"): ("read_paused", "write_paused"),
    (RequestResponseCycle, "__init__"): (
        "message_event",
        "disconnected",
        "keep_alive",
        "more_body",
        "response_started",
        "response_complete",
        "default_headers",
        "scope",
        "transport",
    ),
    (RequestResponseCycle, "send"): ("default_headers", "transport", "close", "on_response"),
    (RequestResponseCycle, "receive"): ("transport", "is_closing", "write"),
    (ServerState, "__init__"): ("total_requests", "connections", "default_headers"),
}


def check_parts() -> None:
    """Raise Failure(INTERNAL) that names the parts which this version of uvicorn lacks."""
    lacking = sorted({*_missing_methods(), *_missing_uses()})
    if lacking:
        raise misfit("uvicorn", uvicorn.__version__, lacking)


def new_parser(connection: HttpToolsProtocol) -> HttpRequestParser:
    """Return a parser at the start of a request, like the one that uvicorn makes for a new connection."""
    parser = HttpRequestParser(connection)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _missing_methods() -> Iterator[str]:
    for owner, names in _METHODS.items():
        for name in names:
            if not callable(getattr(owner, name, None)):
                yield f"{owner.__name__}.{name}"


def _missing_uses() -> Iterator[str]:
    for (owner, method), names in _USES.items():
        code = getattr(getattr(owner, method, None), "__code__", None)
        used = () if code is None else code.co_names
        yield from (f"{name} in {owner.__name__}.{method}" for name in names if name not in used)
