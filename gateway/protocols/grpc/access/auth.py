"""auth: decides who may change settings over gRPC: holders of the admin key; without a key, callers on this machine.

Browsers cannot speak gRPC, so no web page of another origin can call. A proxy that adds no forwarding header cannot be
distinguished from a local client: docs/protocols.md tells operators to set a key behind such a proxy.
"""

from __future__ import annotations

import secrets
from typing import Any
from urllib.parse import unquote

import grpc

from millstream.gateway.access.principal import CALLER
from millstream.gateway.protocols.http.local_caller import forwarding_header, is_loopback
from millstream.services.errors import Code, Failure
from millstream.services.process.audit import acting
from millstream.services.settings import Settings

_BEARER = "bearer "


async def check(settings: Settings, context: Any) -> None:
    """Check that the caller may use the admin API, unless its API key was checked. Raises Failure(UNAUTHENTICATED).

    Ends the call with PERMISSION_DENIED if no key is set and the caller is not local.
    """
    if CALLER.get() is not None:
        return  # its key was checked by the authorisation table
    if settings.admin_key is None:
        if not _is_local(context.peer()):
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                "this call is for this machine only: set MILLSTREAM_ADMIN_KEY to use it from others",
            )
        if name := forwarding_header(key for key, _ in context.invocation_metadata() or ()):
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                f"the call came through a proxy (metadata '{name}'): set MILLSTREAM_ADMIN_KEY to use it through one",
            )
        acting(unquote(context.peer()))
        return
    authorization = next((value for key, value in context.invocation_metadata() or () if key == "authorization"), "")
    if authorization[: len(_BEARER)].lower() != _BEARER:
        raise Failure(Code.UNAUTHENTICATED, "send the admin key: metadata 'authorization: Bearer KEY'")
    # As bytes: compare_digest accepts no text that is not ASCII.
    key = settings.admin_key.get_secret_value().encode()
    if not secrets.compare_digest(authorization[len(_BEARER) :].strip().encode(), key):
        raise Failure(Code.UNAUTHENTICATED, "this is not the admin key")
    acting(unquote(context.peer()), "admin key")


def is_local_call(context: Any) -> bool:
    """Whether a call comes from this machine, and not through a proxy on it."""
    names = (key for key, _ in context.invocation_metadata() or ())
    return _is_local(context.peer()) and forwarding_header(names) is None


def _is_local(peer: str) -> bool:
    """Whether `peer` (ipv4:127.0.0.1:5000, ipv6:%5B::1%5D:5000, unix:PATH) is on this machine."""
    family, _, address = unquote(peer).partition(":")
    return family == "unix" or is_loopback(address.rpartition(":")[0].strip("[]"))
