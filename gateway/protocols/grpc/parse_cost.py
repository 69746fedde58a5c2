"""How much a message would cost to parse, counted in its bytes: two of them can become an object of ninety. Pure.

Only the framing is read: tags and lengths, and what lies within the messages that a ModelInferRequest is made of.
Source: Protocol Buffers, "Encoding".
"""

from __future__ import annotations

from typing import Any

#: a message within a message costs as much as so many plain fields
MESSAGE_UNITS = 8
#: at the largest, a message takes 20 ms to parse, and 30 MB
UNITS_MAX = 1_000_000
#: shorter messages are parsed whatever is in them
UNCOUNTED_BYTES_MAX = 64 * 1024
#: messages with no more units are counted in the event loop: all those whose tensors are raw
COUNTED_INLINE_MAX = 10_000
_VARINT_BYTES_MAX = 10
_SHAPE = 3 << 3 | 2  # tag of an input's dimensions in one piece
_VARINT, _LENGTH = 0, 2  # wire types
_FIXED_BYTES = {1: 8, 5: 4}

_Fields = dict[int, Any]
_LEAVES: _Fields = {}
_PARAMETERS: _Fields = {1: None, 2: _LEAVES}
#: by field number: the messages within; parameters, inputs (parameters, contents), outputs (parameters)
ANY: _Fields = {}
_INPUT: _Fields = {4: _PARAMETERS, 5: _LEAVES}
INFER: _Fields = {4: _PARAMETERS, 5: _INPUT, 6: {2: _PARAMETERS}}


def within(body: bytes, units_max: int, fields: _Fields = INFER) -> bool:
    """Whether a message has at most `units_max` fields, those that are messages counted as MESSAGE_UNITS.

    What is not well formed is for the parser to refuse. `fields`: which fields are messages themselves.
    """
    at, end, units = 0, len(body), 0
    outer: list[tuple[int, _Fields]] = []
    while True:
        while at >= end:
            if not outer:
                return True
            at = end  # whatever the message within said
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
                    units += size  # a byte can be a dimension
            else:
                units += MESSAGE_UNITS - 1
                outer.append((end, fields))
                end, fields = min(at + size, end), inner
        else:
            at += _FIXED_BYTES.get(kind, 0)
        if units > units_max:
            return False


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """The number at `at` and where it ends; a number that does not end is taken to be the last thing in the message."""
    value = 0
    for place, byte in enumerate(body[at : at + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    return value, len(body)
