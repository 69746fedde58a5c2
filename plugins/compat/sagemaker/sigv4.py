"""Verifies requests that are signed with AWS Signature Version 4, as boto3 signs them. Pure; time is passed in.

Authorization ─> Signature ─> canonical request ─> string to sign ─> HMAC chain of the secret ─> compare
Source: AWS, "Create a signed AWS API request"; botocore.auth.SigV4Auth, whose canonical form is compared in the tests.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import quote

from millstream.services.errors import Code, Failure

ALGORITHM = "AWS4-HMAC-SHA256"
CLOCK_S_MAX = 15 * 60  # by which the clocks of client and server may differ
_HEADER = re.compile(
    r"AWS4-HMAC-SHA256 +Credential=([^/,\s]+)/(\d{8})/([^/,\s]+)/([^/,\s]+)/aws4_request, *"
    r"SignedHeaders=([a-z0-9;_.\-]+), *Signature=([0-9a-f]{64})"
)
_NEEDED = frozenset({"host", "x-amz-date"})
#: headers that say which model runs, and others of AWS: all of a request have to be signed
_COVERED = ("x-amz-", "x-amzn-sagemaker-")
_TIME = "%Y%m%dT%H%M%SZ"


class Signature(NamedTuple):
    """The content of the header Authorization."""

    access_key_id: str
    date: str  # YYYYMMDD
    region: str
    service: str
    signed_headers: tuple[str, ...]
    hex: str


class SignedRequest(NamedTuple):
    """What a signature covers. `path`, `query`: as they were sent; `headers`: names in lower case."""

    method: str
    path: str
    query: str
    headers: Sequence[tuple[str, str]]
    body_sha256: str  # in hexadecimal


def is_signature(header: bytes) -> bool:
    """Whether a header Authorization has a signature."""
    return header.startswith(ALGORITHM.encode())


def parse_signature(header: str) -> Signature:
    """Return the signature in a header. Raises Failure(UNAUTHENTICATED) if it is malformed or covers too little."""
    match = _HEADER.fullmatch(header.strip())
    if match is None:
        raise _refused("the AWS signature is malformed")
    signature = Signature(match[1], match[2], match[3], match[4], tuple(match[5].split(";")), match[6])
    if not _NEEDED.issubset(signature.signed_headers):
        raise _refused("an AWS signature has to cover the headers host and x-amz-date")
    return signature


def verify(signature: Signature, request: SignedRequest, secret: str, now: float) -> None:
    """Check a signature. Raises Failure(UNAUTHENTICATED).

    Args:
        signature: of the request.
        request: what was received.
        secret: of the key that the signature names.
        now: seconds since the epoch.
    """
    stamp = _value(request, "x-amz-date")
    _check_clock(signature, stamp, now)
    for name, _ in request.headers:
        if name.startswith(_COVERED) and name not in signature.signed_headers:
            raise _refused(f"an AWS signature has to cover the header {name[:80]}")
    declared = _value(request, "x-amz-content-sha256").encode()
    if declared and not hmac.compare_digest(declared, request.body_sha256.encode()):
        raise _refused("the body is not the one that was signed")
    scope = f"{signature.date}/{signature.region}/{signature.service}/aws4_request"
    canonical = canonical_request(signature, request)
    text = "\n".join((ALGORITHM, stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()))
    expected = hmac.new(signing_key(secret, signature), text.encode(), "sha256").hexdigest()
    if not hmac.compare_digest(expected, signature.hex):
        raise _refused("the AWS signature is wrong: check the secret access key")


def canonical_request(signature: Signature, request: SignedRequest) -> str:
    """Return the text of a request that is signed."""
    pairs = sorted(part.partition("=")[::2] for part in request.query.split("&") if part)
    query = "&".join(f"{name}={value}" for name, value in pairs)
    names = signature.signed_headers
    headers = "".join(f"{name}:{_value(request, name)}\n" for name in names)
    path = quote(_normal(request.path), safe="/~")
    return "\n".join((request.method, path, query, headers, ";".join(names), request.body_sha256))


def signing_key(secret: str, signature: Signature) -> bytes:
    """Return the key of a day, region and service."""
    key = hmac.digest(f"AWS4{secret}".encode(), signature.date.encode(), "sha256")
    for part in (signature.region, signature.service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def _check_clock(signature: Signature, stamp: str, now: float) -> None:
    try:
        signed_at = datetime.strptime(stamp, _TIME).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise _refused("the header x-amz-date is no time") from None
    if stamp[:8] != signature.date:
        raise _refused("the day of the AWS signature is not that of x-amz-date")
    if abs(now - signed_at) > CLOCK_S_MAX:
        raise _refused(
            f"the request was signed {abs(now - signed_at) / 60:.0f} minutes "
            f"{'ago' if signed_at < now else 'from now'}: set the client's clock"
        )


def _value(request: SignedRequest, name: str) -> str:
    """Return the value of a header as it is signed: repeated headers joined, runs of spaces as one space."""
    return ",".join(" ".join(value.split()) for header, value in request.headers if header == name)


def _normal(path: str) -> str:
    """Return a path without empty and dot segments, as botocore signs it."""
    kept: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del kept[-1:]
        elif part not in {"", "."}:
            kept.append(part)
    trailing = "/" if path.endswith("/") and kept else ""
    return f"/{'/'.join(kept)}{trailing}"


def _refused(message: str) -> Failure:
    return Failure(Code.UNAUTHENTICATED, message)
