"""Callers of SageMaker's APIs: those that sign their requests, as boto3 does, and SageMaker itself.

The key's id is the access key id, its secret the secret access key; the gateway derives the secret again.
"""

from __future__ import annotations

import hashlib

from fastapi import Request

from millstream.gateway.access.gate import Gate, KnownKey, Unidentified, platform
from millstream.gateway.access.principal import REVOKED, SIGNATURE, UNKNOWN, Principal
from millstream.gateway.http.auth import Credentials
from millstream.gateway.http.body import read_body
from millstream.gateway.http.deps import Deps
from millstream.plugins.compat.sagemaker import sigv4
from millstream.plugins.compat.sagemaker.settings import is_multi_model
from millstream.services.access import secret as keys
from millstream.services.access.scopes import Row
from millstream.services.errors import Failure
from millstream.services.process.threads import run_in_thread_if_large
from millstream.services.settings import Settings

_SAGEMAKER = platform("SageMaker")  # it sends no key to its containers


async def _check(request: Request, deps: Deps, header: bytes, row: Row) -> Principal:
    """Return who signed the request. Its body is read for that; routes read it again from memory.

    A signature that names no live key is refused before the body is received. Raises Failure(UNAUTHENTICATED).
    """
    gate = deps.gate
    try:
        signature = sigv4.parse_signature(header.decode("latin-1"))
        gate.live(*_signer(gate, signature))
    except Failure as failure:
        return gate.unidentified(failure, row)
    body = request._body = await read_body(request, deps.settings.request_bytes_max)
    body_sha256 = await run_in_thread_if_large(len(body), _sha256, body)
    scope = request.scope
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1").partition("?")[0]
    query = scope["query_string"].decode("latin-1")
    try:
        return _verified(gate, signature, sigv4.SignedRequest(request.method, path, query, headers, body_sha256))
    except Failure as failure:
        return gate.unidentified(failure, row)


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _signer(gate: Gate, signature: sigv4.Signature) -> tuple[KnownKey, Principal]:
    """Return the key that a signature names, and the principal that lives longest. Raises Failure."""
    known = gate.key(signature.access_key_id.removeprefix(keys.PREFIX))
    if known is None:
        raise Unidentified(
            "this is no valid access key id: aws_access_key_id is mr_<id>, aws_secret_access_key what follows it",
            UNKNOWN,
        )
    if known.document.revoked_at is not None:
        raise Unidentified("the key was revoked", REVOKED, known.document.name)
    return known, max(known.principals.values(), key=lambda principal: principal.expires_at)


def _verified(gate: Gate, signature: sigv4.Signature, request: sigv4.SignedRequest) -> Principal:
    known, _ = _signer(gate, signature)  # again: the body may have taken long
    refusal: Failure = Unidentified("the key has no secret", SIGNATURE)
    for stored in known.document.secrets:
        secret = gate.secret_of(known.document.id, stored.salt)
        if not keys.same_text(keys.hash_secret(secret), stored.sha256):
            refusal = Unidentified(
                "this gateway cannot verify AWS signatures of this key: MILLSTREAM_ACCESS_SECRET differs from the "
                "one with which the key was made",
                SIGNATURE,
            )
            continue
        try:
            sigv4.verify(signature, request, secret, gate.wall())
        except Failure as failure:
            refusal = failure
        else:
            return gate.live(known, known.principals[stored.sha256])
    raise refusal


def _platform(settings: Settings, path: str) -> Principal | None:
    """Return SageMaker as the caller of the paths that it calls in a multi-model container."""
    if is_multi_model(settings) and path.split("/")[1:2] in (["models"], ["invocations"]):
        return _SAGEMAKER
    return None


CREDENTIALS = Credentials(sigv4.is_signature, _check, _platform)
