"""The header fields of calls and of replies. Source: gRPC over HTTP2, "Requests" and "Responses"."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from millstream.gateway.grpc.connections import message_framing
from millstream.gateway.grpc.connections.call_head import CallHead, read_head

CALL = {
    b":method": b"POST",
    b":scheme": b"http",
    b":path": b"/package.Service/Method",
    b"te": b"trailers",
    b"content-type": b"application/grpc",
}


def head(**changes: bytes) -> CallHead:
    fields = CALL | {name.replace("_", "-").encode(): value for name, value in changes.items()}
    return read_head(list(fields.items()))


def fields_of(block: bytes) -> list[tuple[str, str]]:
    fields: Any = Decoder(1 << 20).decode(block)
    return [(name, value) for name, value in fields]


def test_a_plain_call():
    assert head() == CallHead("/package.Service/Method", (), None, b"identity", frozenset({b"identity"}))


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [(b"2H", 7200), (b"3M", 180), (b"5S", 5), (b"250m", 0.25), (b"7u", 7e-6), (b"99999999n", 0.099999999), (b"0S", 0)],
)
def test_timeouts(sent, seconds):
    assert head(grpc_timeout=sent).timeout_s == pytest.approx(seconds)


@pytest.mark.parametrize("sent", [b"", b"S", b"1", b"1s", b"-1S", b"123456789S", b"1.5S", b"1S "[:2] + b"x"])
def test_malformed_timeouts(sent):
    assert head(grpc_timeout=sent).fault


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (b"application/grpc", 200),
        (b"application/grpc+proto", 200),
        (b"application/grpc;charset=utf-8", 200),
        (b"application/grpc-web", 415),
        (b"application/json", 415),
        (b"", 415),
    ],
)
def test_content_types(content_type, status):
    assert head(content_type=content_type).http_status == status


def test_methods_other_than_post():
    assert read_head([*{**CALL, b":method": b"GET"}.items()]).http_status == 405


def test_metadata_keeps_order_and_repetitions_and_decodes_binary_values():
    sent = [*CALL.items(), (b"a", b"1"), (b"x-bin", base64.b64encode(b"\0\xff").rstrip(b"=")), (b"a", b"2")]
    assert read_head(sent).metadata == (("a", "1"), ("x-bin", b"\0\xff"), ("a", "2"))


def test_binary_values_that_were_joined_are_several_entries():
    sent = [*CALL.items(), (b"x-bin", b"AA, AQI=,"), (b"x", b"1,2")]
    assert read_head(sent).metadata == (("x-bin", b"\0"), ("x-bin", b"\1\2"), ("x-bin", b""), ("x", "1,2"))


@pytest.mark.parametrize("field", [(b"x-bin", b"*"), (b"x-bin", b"AA,*"), (b"x", b"\xff")])
def test_malformed_metadata(field):
    assert "metadata" in read_head([*CALL.items(), field]).fault


@given(st.text(max_size=300))
def test_status_messages_survive(message):
    fields = dict(fields_of(message_framing.trailers(5, message)))
    assert fields.pop("grpc-status") == "5"
    sent = fields.get("grpc-message", "")
    assert sent.isascii()
    assert sent.isprintable()
    assert unquote_to_bytes(sent) == message.encode("utf-8", "backslashreplace")


def test_a_long_status_message_is_cut_between_characters():
    sent = dict(fields_of(message_framing.trailers(5, "ß" * 10_000)))["grpc-message"]
    assert len(sent) <= message_framing.MESSAGE_BYTES_MAX
    assert set(unquote_to_bytes(sent).decode()) == {"ß"}


def test_trailing_metadata_is_sent_binary_values_in_base64():
    block = message_framing.trailers_only(0, "", (("a", "1"), ("b-bin", b"\0\xff")))
    assert fields_of(block) == [
        (":status", "200"),
        ("content-type", "application/grpc"),
        ("grpc-status", "0"),
        ("a", "1"),
        ("b-bin", "AP8"),
    ]
