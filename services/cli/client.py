"""An HTTP client for the API, as the command line uses it: one method per call; every error is a Failure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from millstream.services.cli.options import ServerAddress
from millstream.services.errors import Code, Failure, invalid

CHUNK_BYTES = 256 << 10
TIMEOUT_S = 60.0
CHECK_S_MAX = 600.0

Progress = Callable[[int], None]


class Api:
    """A client of one server; use it as an async context manager.

    Ignores proxy variables of the environment: requests go directly to the server's URL.
    """

    def __init__(self, server: ServerAddress) -> None:
        self.server = server
        headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
        self._client = httpx.AsyncClient(
            base_url=server.url, headers=headers, timeout=TIMEOUT_S, trust_env=False, follow_redirects=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request and return its reply. Raises Failure with the server's own message, or with what to do."""
        try:
            reply = await self._client.request(method, path, **options)
        except httpx.ConnectError as error:
            raise Failure(
                Code.UNAVAILABLE, f"no server answers at {self.server.url}: is `millstream up` running?"
            ) from error
        except httpx.TimeoutException as error:
            raise Failure(Code.EXPIRED, f"{self.server.url} did not answer in time") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise Failure(Code.UNAVAILABLE, f"the connection to {self.server.url} failed: {reason}") from error
        if reply.is_success:
            return reply
        raise Failure(_CODES.get(reply.status_code, Code.INTERNAL), _error_message(reply))

    async def models(self) -> list[dict[str, Any]]:
        models: list[dict[str, Any]] = _object(await self.send("GET", "/admin/v1/models"))["models"]
        return models

    async def model(self, name: str) -> dict[str, Any]:
        return _object(await self.send("GET", f"/admin/v1/models/{quote(name, safe='')}"))

    async def version(self, name: str, version: int) -> dict[str, Any]:
        return _object(await self.send("GET", f"/admin/v1/models/{quote(name, safe='')}/versions/{version}"))

    async def remove(self, name: str, version: int | None) -> None:
        await self.send("DELETE", f"/admin/v1/models/{quote(name, safe='')}" + _version(version))

    async def load(self, name: str, *, config: str | None = None, wait_s: float, retry: bool = True) -> None:
        """Load a model, one of a repository from its current files; return when it serves.

        `retry` also loads versions that failed before because they killed processes or took too long.
        """
        path = f"/v2/repository/models/{quote(name, safe='')}/load" + ("" if retry else "?retry=false")
        body = {"parameters": {"config": config}} if config is not None else {}
        await self.send("POST", path, json=body, timeout=httpx.Timeout(TIMEOUT_S, read=wait_s))

    async def unload(self, name: str) -> None:
        """Stop serving a model until it is loaded again."""
        await self.send("POST", f"/v2/repository/models/{quote(name, safe='')}/unload", json={})

    async def push(
        self,
        name: str,
        path: Path,
        *,
        version: int | None = None,
        config: dict[str, Any] | None = None,
        activate: bool = True,
        wait_s: float = 0,
        progress: Progress = lambda _: None,
    ) -> dict[str, Any]:
        """Upload a file as a new version; `progress` is called with the size of each chunk that was sent.

        Waits at most `wait_s` seconds until the version is ready or has failed, then returns its document.
        """
        parameters: dict[str, str] = {}
        if wait_s:
            parameters["wait"] = f"{wait_s:g}"
        if not activate:
            parameters["activate"] = "false"
        if config:
            parameters["config"] = json.dumps(config)
        path_ = f"/admin/v1/models/{quote(name, safe='')}/versions" + (f"/{version}" if version else "")
        reply = await self.send(
            "PUT" if version else "POST",
            path_,
            params=parameters,
            content=_chunks(path, progress),
            headers={
                "Content-Type": "application/octet-stream",
                "Content-Length": str(path.stat().st_size),
                "X-Content-SHA256": digest_of(path),
            },
            timeout=httpx.Timeout(TIMEOUT_S, read=CHECK_S_MAX + wait_s),
        )
        return _object(reply)

    async def metadata(self, name: str, version: int | None = None) -> dict[str, Any]:
        return _object(await self.send("GET", f"/v2/models/{quote(name, safe='')}" + _version(version)))

    async def infer(
        self, name: str, version: int | None, body: bytes, header_bytes: int | None = None
    ) -> httpx.Response:
        """Send an inference request; `header_bytes` is the length of the JSON in `body` if binary tensors follow it."""
        headers = {"Content-Type": "application/json"}
        if header_bytes is not None:
            headers = {
                "Content-Type": "application/octet-stream",
                "Inference-Header-Content-Length": str(header_bytes),
            }
        path = f"/v2/models/{quote(name, safe='')}{_version(version)}/infer"
        return await self.send("POST", path, content=body, headers=headers)

    async def metrics(self) -> str:
        return (await self.send("GET", "/metrics")).text


def digest_of(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal. Raises Failure(INVALID) if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise invalid(f"{path}: {error.strerror or error}") from error


async def _chunks(path: Path, progress: Progress) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
            progress(len(chunk))


def _version(version: int | None) -> str:
    return "" if version is None else f"/versions/{version}"


def _object(reply: httpx.Response) -> dict[str, Any]:
    try:
        document = reply.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise Failure(
            Code.INTERNAL, f"{reply.url} is not a Millstream server: it answered {reply.text[:80]!r}; check --url"
        )
    return document


_CODES = {400: Code.INVALID, 401: Code.UNAUTHENTICATED, 403: Code.UNAUTHENTICATED, 404: Code.NOT_FOUND}
_CODES |= {409: Code.CONFLICT, 429: Code.OVERLOADED, 503: Code.UNAVAILABLE}


def _error_message(reply: httpx.Response) -> str:
    try:
        message = str(reply.json()["error"])
    except (ValueError, LookupError, TypeError):
        message = f"{reply.request.method} {reply.url} answered {reply.status_code} {reply.reason_phrase}"
    if reply.status_code in {401, 403}:
        message += " (set the key with --key or MILLSTREAM_ADMIN_KEY)"
    return " ".join(message.split())
