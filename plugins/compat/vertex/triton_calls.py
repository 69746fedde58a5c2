"""ASGI middleware: calls of Triton's clients on Vertex AI, which has one path for all of them.

X-Vertex-Ai-Triton-Redirect: v2/models/m/infer ─> the route of that path, with its own authorisation
Content-Type with json-header-size=n           <─> application/octet-stream with Inference-Header-Content-Length: n

Source: Triton, vertex_ai_server.cc. There, too, only these calls can be redirected, and a call that only reads becomes
a GET, since Vertex AI passes on POST alone.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.gateway.http.errors import ErrorReplies
from millstream.gateway.http.openapi import OCTETS
from millstream.services.errors import Failure, invalid

REDIRECT = "x-vertex-ai-triton-redirect"
PREFIX = "application/vnd.vertex-ai-triton.binary+json;json-header-size="
_LENGTH = "inference-header-content-length"
_MODEL = r"v2/models/[^/]+(?:/versions/[0-9]+)?"
_REPOSITORY = r"v2/repository(?:/[^/]+)?"
_MEMORY = r"v2/(?:system|cuda)sharedmemory(?:/region/[^/]+)?"
_READS = re.compile(
    rf"metrics|v2|v2/health/(?:live|ready)|v2/models/stats|{_MODEL}(?:/(?:ready|config|stats))?|{_MEMORY}/status"
)
_POSTS = re.compile(
    rf"{_MODEL}/(?:infer|generate|generate_stream)|{_REPOSITORY}/index|{_REPOSITORY}/models/[^/]+/(?:load|unload)"
    rf"|{_MEMORY}/(?:register|unregister)"
)
_DIGITS = re.compile(r"[0-9]{1,10}")


class TritonCalls:
    """Passes on what is sent to Vertex AI's path of predictions, as the call that its headers name.

    Args:
        route: Vertex AI's path of predictions.
        replies: writes the refusals.
    """

    def __init__(self, app: ASGIApp, route: str, replies: ErrorReplies) -> None:
        self.app = app
        self._route = route
        self._replies = replies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == self._route and scope["method"] == "POST":
            scope = {**scope, "headers": [*scope["headers"]]}
            headers = MutableHeaders(scope=scope)
            try:
                _redirect(scope, headers)
                binary = _read_length(headers)
            except Failure as failure:
                await self._replies.reply(self._route, failure)(scope, receive, send)
                return
            if binary or scope["path"] != self._route:
                await self.app(scope, receive, _announcing(send))
                return
        await self.app(scope, receive, send)


def _redirect(scope: MutableMapping[str, Any], headers: MutableHeaders) -> None:
    """Make the call the one that the header names, if there is one. Raises Failure."""
    targets = headers.getlist(REDIRECT)
    if not targets:
        return
    target = targets[0]
    reads = _READS.fullmatch(target) is not None
    if len(targets) > 1 or not (reads or _POSTS.fullmatch(target)):
        raise invalid(
            f"X-Vertex-Ai-Triton-Redirect cannot be followed to {target[:100]!a}: it names one call of Triton's, such "
            "as v2/models/MODEL/infer"
        )
    del headers[REDIRECT]
    raw_path = b"/" + target.encode("latin-1")
    scope.update(path=unquote(f"/{target}"), raw_path=raw_path, method="GET" if reads else "POST")


def _read_length(headers: MutableHeaders) -> bool:
    """Replace Vertex AI's content type of binary tensors, if it is sent, by Triton's headers. Raises Failure."""
    content_type = headers.get("content-type", "")
    if PREFIX not in content_type:
        return False
    digits = content_type.removeprefix(PREFIX).strip()
    if not content_type.startswith(PREFIX) or not _DIGITS.fullmatch(digits):
        raise invalid(f"a Content-Type of binary tensors is '{PREFIX}' and the number of bytes of JSON")
    headers["content-type"] = OCTETS
    headers[_LENGTH] = digits
    return True


def _announcing(send: Send) -> Send:
    """Return `send` with the length of a reply's JSON part in its content type, where Vertex AI's clients look."""

    async def announce(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            length = headers.get(_LENGTH)
            if length is not None:
                del headers[_LENGTH]
                headers["content-type"] = f"{PREFIX}{length}"
        await send(message)

    return announce
