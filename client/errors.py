"""Errors of the client. Each is a Failure: its message is one line, its code says what kind of failure it is."""

from __future__ import annotations

from enum import StrEnum

from millstream.services.errors import Code, Failure, Subject


class ServerError(Failure):
    """The server answered with an error.

    Args:
        code: what kind of failure the status is.
        message: the server's own message.
        status: the HTTP status.
        request_id: the id of the request, if the reply has one; the server's logs name it.
        retry_after_s: seconds until another attempt makes sense, if the reply says so.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        status: int,
        request_id: str | None = None,
        retry_after_s: float | None = None,
        subject: Subject | None = None,
    ) -> None:
        super().__init__(code, message, retry_after_s=retry_after_s, subject=subject)
        self.status = status
        self.request_id = request_id


class ModelNotFound(ServerError):
    """The server has no such model, or no such version of it."""


class Cause(StrEnum):
    """Why a connection failed."""

    REFUSED = "refused"  # nothing listens there: the request was not sent
    UNKNOWN_HOST = "unknown host"  # the name has no address
    UNREACHABLE = "unreachable"  # another failure before the request was sent
    TLS = "tls"  # no TLS connection came about, or TLS is missing
    PROTOCOL = "protocol"  # the other side does not speak HTTP/1.1
    CLOSED = "closed"  # the connection ended before any reply
    INCOMPLETE = "incomplete"  # the connection ended within the reply


class ConnectionFailed(Failure):
    """No complete reply came, because no connection could be made or it ended early. `cause`: why."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(Code.UNAVAILABLE, message)
        self.cause = cause


class Timeout(Failure):
    """The server did not answer in time, or a version did not become ready in time."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.EXPIRED, message)


class WrongFile(Failure):
    """A file or folder is no model that the server could serve. Nothing was sent."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID, message)


class VersionFailed(Failure):
    """A version cannot serve; `reason` is the server's."""

    def __init__(self, model: str, version: int, reason: str) -> None:
        super().__init__(Code.MODEL, f"{model} version {version} failed: {reason}", subject=Subject.VERSION)
        self.model = model
        self.version = version
        self.reason = reason
