"""Bounds the cost of parsing a message: two of its bytes can become an object of ninety bytes. Pure.

Only the framing is read: tags and lengths, also inside the messages that a ModelInferRequest contains.
Source: Protocol Buffers, "Encoding".
"""

from __future__ import annotations

from typing import Any

#: cost of a message inside a message, in plain fields
MESSAGE_UNITS = 8
#: a message of this cost takes 20 ms and 30 MB to parse; a larger cost is TOO_LARGE
UNITS_MAX = 1_000_000
#: shorter messages are parsed without counting
UNCOUNTED_BYTES_MAX = 64 * 1024
#: up to this cost, messages are counted in the event loop; messages with raw tensors cost less
COUNTED_INLINE_MAX = 10_000
_VARINT_BYTES_MAX = 10
_SHAPE = 3 << 3 | 2  # tag of an input's dimensions, packed
_VARINT, _LENGTH = 0, 2  # wire types
_FIXED_BYTES = {1: 8, 5: 4}

Fields = dict[int, Any]
_LEAVES: Fields = {}
_PARAMETERS: Fields = {1: None, 2: _LEAVES}
#: Field number -> fields of the message in it: parameters, inputs (parameters, contents), outputs (parameters).
ANY: Fields = {}
_INPUT: Fields = {4: _PARAMETERS, 5: _LEAVES}
INFER: Fields = {4: _PARAMETERS, 5: _INPUT, 6: {2: _PARAMETERS}}


def within(body: bytes, units_max: int, fields: Fields = INFER) -> bool:
    """Whether a message has at most `units_max` fields; a field that is a message counts as MESSAGE_UNITS.

    A message that is not well formed is left to the parser to refuse.

    Args:
        body: the encoded message.
        units_max: the limit.
        fields: the fields that are messages, by field number.
    """
    at, end, units = 0, len(body), 0
    outer: list[tuple[int, Fields]] = []
    while True:
        while at >= end:
            if not outer:
                return True
            at = end  # even if a length in the inner message points beyond its end
            end, fields = outer.pop()
        units += 1
        tag, at = _varint(body, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(body, at)
        elif kind == _LENGTH:
            size, at = _varint(body, at)
            inner = fields.get(tag >> 3)
            if inner is None:
                at += size
                if tag == _SHAPE and fields is _INPUT:
                    units += size  # each byte can be a dimension
            else:
                units += MESSAGE_UNITS - 1
                outer.append((end, fields))
                end, fields = min(at + size, end), inner
        else:
            at += _FIXED_BYTES.get(kind, 0)
        if units > units_max:
            return False


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at` and the position after it: the end of the message if the number does not end."""
    value = 0
    for place, byte in enumerate(body[at : at + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    return value, len(body)
