"""binary: Triton's binary tensors under SageMaker's headers: the Content-Type holds the length of the JSON part. Pure.

Source: Triton, sagemaker_server.cc, "application/vnd.sagemaker-triton.binary+json;json-header-size=".
"""

from __future__ import annotations

from millstream.services.errors import invalid

PREFIX = "application/vnd.sagemaker-triton.binary+json;json-header-size="

_DIGITS_MAX = 10


def header_bytes(content_type: str) -> int | None:
    """Return the length of the JSON part; None for another content type. Raises Failure(INVALID)."""
    if not content_type.startswith(PREFIX):
        return None
    digits = content_type.removeprefix(PREFIX).strip()
    if not (digits.isascii() and digits.isdigit()) or len(digits) > _DIGITS_MAX:
        raise invalid("Unable to parse json-header-size in the Content-Type: it is a number of bytes")
    return int(digits)
