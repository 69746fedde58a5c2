"""What RFC 7541 requires of a decoder, by its sections: the cases of h2spec, and the examples of appendix C."""

from __future__ import annotations

import pytest
from hpack import Encoder

from millstream.gateway.http2.events import ConnectionFault, ErrorCode
from millstream.gateway.http2.header_blocks import HeaderReader, Headers


def reader() -> HeaderReader[Headers]:
    return HeaderReader(lambda headers: headers, 1 << 16, 1 << 17)


def fields(*pairs: str) -> Headers:
    """Return fields written as `name: value`."""
    parted = [pair.rpartition(": ") for pair in pairs]
    return [(name.encode(), value.encode()) for name, _, value in parted]


#: section and case -> a header block that is a connection error of the type COMPRESSION_ERROR
MALFORMED: dict[str, str] = {
    "2.3.3 index beyond the tables": "ff00",
    "2.3.3 name with an index beyond the tables": "7f20 0131",
    "4.2 size of the table behind a field": "82 20",
    "4.2 size of the table over the setting": "3f e2 1f",
    "5.1 integer that does not end": "ff" * 10_000,
    "5.1 integer over 32 bits": "7f ff ff ff ff ff ff 0f",
    "5.1 integer that ends with the block": "ff",
    "5.2 string longer than its block": "00 7f 00 61 62 63",
    "5.2 Huffman padding over 7 bits": "00 85 f2b24a84ff 84 49509fff",
    "5.2 Huffman padding of zeros": "00 85 f2b24a84ff 83 49509c00"[:-2],
    "5.2 Huffman EOS": "00 85 f2b24a84ff 87 49509fffffffff",
    "6.1 index 0": "80",
    "6.2 literal without a value": "40 01 61",
    "6.2.3 literal without a name": "10",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_block_is_a_compression_error(case):
    with pytest.raises(ConnectionFault) as caught:
        reader().read(bytes.fromhex(MALFORMED[case]))
    assert caught.value.code is ErrorCode.COMPRESSION_ERROR


FIRST = ":method: GET", ":scheme: http", ":path: /", ":authority: www.example.com"
#: section and case -> blocks of one connection, with their fields
SEQUENCES: dict[str, list[tuple[str, Headers]]] = {
    "2.3.2 entry that was evicted by a smaller table": [
        ("40 01 61 01 31 be", fields("a: 1", "a: 1")),
        ("20 3f e1 1f 40 01 62 01 32 be", fields("b: 2", "b: 2")),
    ],
    "4.2 two sizes of the table": [("20 3f e1 1f 82", fields(":method: GET"))],
    "4.4 entry larger than the table empties it": [
        ("40 01 61 01 31", fields("a: 1")),
        ("3f 09 40 01 62 0a" + "78" * 10 + "82", [(b"b", b"x" * 10), (b":method", b"GET")]),
        ("40 01 63 00 be", fields("c: ", "c: ")),
    ],
    "5.1 integer with octets that add nothing": [("3f 80 80 80 00 82", fields(":method: GET"))],
    "C.2.1 literal with indexing": [
        ("400a 6375 7374 6f6d 2d6b 6579 0d63 7573 746f 6d2d 6865 6164 6572", fields("custom-key: custom-header"))
    ],
    "C.2.2 literal without indexing": [("040c 2f73 616d 706c 652f 7061 7468", fields(":path: /sample/path"))],
    "C.2.3 literal never indexed": [("1008 7061 7373 776f 7264 0673 6563 7265 74", fields("password: secret"))],
    "C.2.4 indexed field": [("82", fields(":method: GET"))],
    "C.3 requests": [
        ("8286 8441 0f77 7777 2e65 7861 6d70 6c65 2e63 6f6d", fields(*FIRST)),
        ("8286 84be 5808 6e6f 2d63 6163 6865", fields(*FIRST, "cache-control: no-cache")),
        (
            "8287 85bf 400a 6375 7374 6f6d 2d6b 6579 0c63 7573 746f 6d2d 7661 6c75 65",
            fields(FIRST[0], ":scheme: https", ":path: /index.html", FIRST[3], "custom-key: custom-value"),
        ),
    ],
    "C.4 requests in Huffman code": [
        ("8286 8441 8cf1 e3c2 e5f2 3a6b a0ab 90f4 ff", fields(*FIRST)),
        ("8286 84be 5886 a8eb 1064 9cbf", fields(*FIRST, "cache-control: no-cache")),
        (
            "8287 85bf 4088 25a8 49e9 5ba9 7d7f 8925 a849 e95b b8e8 b4bf",
            fields(FIRST[0], ":scheme: https", ":path: /index.html", FIRST[3], "custom-key: custom-value"),
        ),
    ],
}


@pytest.mark.parametrize("case", SEQUENCES)
def test_blocks_of_a_connection_are_read(case):
    read = reader().read
    for block, expected in SEQUENCES[case]:
        assert read(bytes.fromhex(block)) == expected


def test_2_3_2_entries_beyond_the_size_of_the_table_are_evicted():
    read, encoder = reader().read, Encoder()
    for number in range(300):  # of 40 bytes each: the table holds 102
        read(encoder.encode([(f"{number:04}", "abcd")]))
    assert read(b"\xbe") == [(b"0299", b"abcd")]
    assert read(b"\xff\x24") == [(b"0198", b"abcd")]  # index 163, the last entry
    with pytest.raises(ConnectionFault):
        read(b"\xff\x25")
