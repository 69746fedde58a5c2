"""What a body may do to the decoder: be read, or be refused by a clean Failure. The same by one that has seen many
others.

json: a body that is all JSON     binary: "<Inference-Header-Content-Length>\\n<body>"
packed: "<Content-Encoding>\\n<body>"
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable
from typing import NamedTuple

from millstream.gateway.connection.error_reply import error_reply
from millstream.gateway.http.compression import decompress
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.v2.decode import V2Decoder, parse_header_length
from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import BYTES, ITEM_BYTES
from millstream.services.model.signature import Signature, TensorSpec

ROWS_MAX = 8
JSON_BYTES_MAX = 1 << 20
UNPACKED_BYTES_MAX = 1 << 16
MESSAGE_CHARACTERS_MAX = 2000  # a caller's text is not repeated at length
#: what the standard library makes of the same bytes; `bytes`: leaves them as they are
_UNPACKERS: dict[bytes, Callable[[bytes], bytes]] = {
    b"gzip": gzip.decompress,
    b"x-gzip": gzip.decompress,
    b"deflate": zlib.decompress,
}
#: what ISA-L reads and zlib refuses: codes with unused bit patterns; the checksum of the content is right
ONLY_ZLIB_REFUSES = ("invalid distances set", "invalid literal/lengths set", "invalid code lengths set", "end-of-block")
_CLEAN = {Code.INVALID, Code.TOO_LARGE, Code.ENCODING, Code.UNSUPPORTED}


def _signature(batching: bool, **inputs: tuple[str, tuple[int, ...]]) -> Signature:
    specs = [TensorSpec(name=name, datatype=datatype, shape=shape) for name, (datatype, shape) in inputs.items()]
    return Signature(inputs=tuple(specs), outputs=tuple(specs), batching=batching)


SIGNATURES = [
    _signature(True, x=("FP32", (-1, 2))),
    _signature(True, a=("INT64", (-1, 1)), b=("BYTES", (-1, -1)), c=("BOOL", (-1, 2)), d=("FP16", (-1, -1))),
    _signature(False, x=("FP64", (2, -1))),
    _signature(False, x=("BYTES", (1,))),
]


class Read(NamedTuple):
    """What came of a body: tensors and options, or the words of its refusal."""

    tensors: tuple[tuple[tuple[int, ...], bytes], ...]
    said: str


def _decoders() -> list[V2Decoder]:
    return [V2Decoder(InputPlans("m", signature, ROWS_MAX), JSON_BYTES_MAX) for signature in SIGNATURES]


_SEASONED = _decoders()  # they see all inputs of a run


def fuzz_json(data: bytes) -> None:
    """A body without an Inference-Header-Content-Length."""
    _decode(data, None)


def fuzz_binary(data: bytes) -> None:
    """The header, a newline, the body."""
    header, _, body = data.partition(b"\n")
    _decode(body, header)


def fuzz_packed(data: bytes) -> None:
    """The Content-Encoding, a newline, the body."""
    encoding, _, body = data.partition(b"\n")
    try:
        plain = decompress(body, encoding, UNPACKED_BYTES_MAX)
    except Failure as failure:
        _check_refusal(failure)
        return
    assert len(plain) <= UNPACKED_BYTES_MAX
    try:
        assert plain == _UNPACKERS.get(encoding.strip().lower(), bytes)(body)
    except zlib.error as error:
        assert any(words in str(error) for words in ONLY_ZLIB_REFUSES), error
    _decode(plain, None)


def _decode(body: bytes, header: bytes | None) -> None:
    for signature, seasoned, fresh in zip(SIGNATURES, _SEASONED, _decoders(), strict=True):
        once = _read(fresh, signature, body, header)
        # Twice: the second time the envelope may be remembered.
        for decoder in (fresh, seasoned, seasoned):
            assert _read(decoder, signature, body, header) == once


def _read(decoder: V2Decoder, signature: Signature, body: bytes, header: bytes | None) -> Read:
    try:
        call = decoder.decode(body, None if header is None else parse_header_length(header))
    except Failure as failure:
        return Read((), _check_refusal(failure))
    assert len(call.inputs) == len(signature.inputs)
    for tensor, spec in zip(call.inputs, signature.inputs, strict=True):
        assert tensor.size_bytes == len(tensor.data)
        assert all(dim in (wanted, -1) or wanted == -1 for dim, wanted in zip(tensor.shape, spec.shape, strict=True))
        if spec.datatype != BYTES:
            assert tensor.size_bytes == math.prod(tensor.shape) * ITEM_BYTES[spec.datatype]
        if signature.batching:
            assert call.options.rows == tensor.shape[0] <= ROWS_MAX
    return Read(tuple((tensor.shape, bytes(tensor.data)) for tensor in call.inputs), repr(call.options))


def _check_refusal(failure: Failure) -> str:
    assert failure.code in _CLEAN, failure
    assert len(failure.message) <= MESSAGE_CHARACTERS_MAX, failure
    error_reply(failure)
    return failure.message
