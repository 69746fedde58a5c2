"""Numbers of bytes in messages for people. Pure."""

from __future__ import annotations

_MIB = 1 << 20
_BYTES_BELOW = 10 * _MIB  # of smaller needs the bytes are told


def sizes(need_bytes: int, *there_bytes: int) -> tuple[str, ...]:
    """Return what something needs and what is there, in the unit of the need.

    The need is rounded up and what is there down: what is more looks like more.
    """
    if need_bytes < _BYTES_BELOW:
        return f"{need_bytes} bytes", *(f"{there} bytes" for there in there_bytes)
    return f"{-(-need_bytes // _MIB)} MiB", *(f"{there // _MIB} MiB" for there in there_bytes)
