"""browser_middleware: refuses web pages of other origins, and ambiguous paths, also where there is no route."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.access.gate import Gate
from millstream.gateway.connection.infer_handler import InferHeaders
from millstream.gateway.http.errors import ErrorReplies
from millstream.gateway.http.unknown_path import slash_fault


class BrowserMiddleware:
    """ASGI middleware: asks the guard before any route runs. The fast path asks it for its own requests.

    Args:
        guard: refuses requests.
        gate: checks keys: a call with a right one passes.
        replies: writes the refusals, in the form of the path's protocol.
        is_keyless: whether calls of a path need no key even where there are keys.
    """

    def __init__(
        self, app: ASGIApp, guard: BrowserGuard, gate: Gate, replies: ErrorReplies, is_keyless: Callable[[str], bool]
    ) -> None:
        self.app = app
        self._guard = guard
        self._gate = gate
        self._replies = replies
        self._is_keyless = is_keyless

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers, path = scope["headers"], scope["path"]
            credential = InferHeaders.read(headers).credential
            keyless = self._is_keyless(path)
            failure = slash_fault(path, scope.get("raw_path") or b"") or self._guard.refusal(
                scope["method"], dict(headers), self._gate, credential, keyless=keyless
            )
            if failure is not None:
                await self._replies.reply_failure(path, failure)(scope, receive, send)
                return
        await self.app(scope, receive, send)
