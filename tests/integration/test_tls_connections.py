"""TLS below the HTTP protocol class: handshakes that fail, never end or are many, odd records, and ends.

test_fast_path_limits, test_fast_path_order and test_fast_path_ends run over TLS, too.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from millstream.gateway.connection.fast_path import FastPathProtocol
from millstream.gateway.connection.infer_handler import HttpReply, reply_headers
from millstream.gateway.connection.tls_connection import RECORDS_PER_TURN_MAX, Handshakes, TlsConnection
from millstream.gateway.connection.tls_transport import PIECE_BYTES, TlsTransport
from millstream.services.tls.files import TlsFiles
from millstream.services.tls.identity import load_identity
from tests.kit import wire as kit
from tests.kit.libssl import KeyChangingClient
from tests.kit.servers import Front, fronting
from tests.kit.tls import CERTIFICATES
from tests.kit.tls_wire import FILES, TlsWire, client_context, over_tls
from tests.kit.wire import PATIENCE_S, Wire, post, until

pytestmark = pytest.mark.anyio
NOW = "/v2/models/now/infer"
PATH = "/v2/models/m/infer"
HANDSHAKES_MAX = 8
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def handshakes() -> Handshakes:
    return Handshakes(HANDSHAKES_MAX)


@pytest.fixture
def options() -> dict[str, Any]:
    """Options of the listener, which a test may set with `parametrize`."""
    return {}


@pytest.fixture
def listening_over_tls(handshakes: Handshakes, options: dict[str, Any]) -> Iterator[None]:
    given = {"handshakes": handshakes, "handshake_s_max": PATIENCE_S * 2, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kit, "below", functools.partial(over_tls, **given))
        yield


@pytest.fixture
async def front(listening_over_tls: None, tmp_path: Path, handshakes: Handshakes) -> AsyncIterator[Front]:
    async with fronting(tmp_path) as front:
        yield front
        await until(lambda: not handshakes)


async def works(front: Front) -> None:
    async with await TlsWire.connect(front.port) as wire:
        await wire.send(post(NOW, b"works"))
        assert (await wire.reply()).body == b"works"


async def client_of(front: Front, context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> TlsWire:
    """Return a client with this context, before its handshake."""
    wire = await Wire.connect(front.port)
    client = TlsWire(wire._sock)
    client.tls = context.wrap_bio(client._incoming, client._outgoing, server_hostname="localhost", session=session)
    return client


@pytest.mark.parametrize("options", [{"handshake_s_max": 0.05}])
@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"])
async def test_a_handshake_that_does_not_end_is_reset(front: Front, sent: bytes) -> None:
    async with await Wire.connect(front.port) as wire:
        if sent:
            with suppress(ConnectionError):  # on a busy machine it is reset before
                await wire.send(sent)
        assert await wire.rest() == b""


async def test_unfinished_handshakes_do_not_stop_others(front: Front, handshakes: Handshakes) -> None:
    unfinished = [await Wire.connect(front.port) for _ in range(HANDSHAKES_MAX - 1)]
    for wire in unfinished:
        await wire.send(b"\x16\x03\x01")
    await until(lambda: len(handshakes) == len(unfinished))
    await works(front)
    assert len(handshakes) == len(unfinished)
    for wire in unfinished:
        wire.close()


async def test_of_too_many_handshakes_the_oldest_is_reset(front: Front, handshakes: Handshakes) -> None:
    unfinished = [await Wire.connect(front.port) for _ in range(HANDSHAKES_MAX)]
    await until(lambda: len(handshakes) == HANDSHAKES_MAX)
    await works(front)
    assert len(handshakes) == HANDSHAKES_MAX - 1
    await works(front)
    assert len(handshakes) == HANDSHAKES_MAX - 1
    assert await unfinished[0].rest() == b""
    for wire in unfinished:
        wire.close()


@pytest.mark.parametrize("segments", [1, 3])
async def test_plain_http_gets_an_answer_that_says_what_to_do(
    front: Front, segments: int, caplog: pytest.LogCaptureFixture
) -> None:
    request = post(NOW, bytes(1 << 20))
    async with await Wire.connect(front.port) as wire:
        await wire.send(*[request[at : at + 1] for at in range(segments - 1)], request[segments - 1 :])
        reply = await wire.reply()
        assert (reply.status, reply.headers[b"connection"]) == (400, b"close")
        assert b"this port speaks HTTPS" in reply.body
        assert b"call https://" in reply.body
        assert await wire.rest() == b""
    assert "1 x plain HTTP on the HTTP port, last from 127.0.0.1" in caplog.text


async def test_bytes_of_no_known_protocol_are_reset(front: Front) -> None:
    async with await Wire.connect(front.port) as wire:
        await wire.send(b"\x00\x01\x02")
        assert await wire.rest() == b""


async def test_a_handshake_that_fails_ends_with_an_alert(front: Front) -> None:
    async with await Wire.connect(front.port) as wire:
        await wire.send(b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00")  # a ClientHello of one byte
        alert = await wire.rest()
        assert (alert[0], alert[5]) == (21, 2)  # an alert, fatal
    await works(front)


async def test_a_damaged_record_ends_its_connection(front: Front) -> None:
    async with await TlsWire.connect(front.port) as wire:
        await Wire.send(wire, b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(ssl.SSLError, match="ALERT_BAD_RECORD_MAC"):
            await wire.reply()
    await works(front)


async def test_records_of_one_byte(front: Front) -> None:
    body = b"x" * 300
    async with await TlsWire.connect(front.port) as wire:
        request = post(NOW, body)
        await wire.send(*[request[at : at + 1] for at in range(len(request))])
        assert (await wire.reply()).body == body


async def test_records_beyond_those_of_a_turn_wait_for_the_next(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others get their turn: tiny records cost the server as much as full ones."""
    read: list[int] = []
    pump = TlsConnection._pump

    def counted(connection: TlsConnection) -> None:
        read.append(0)
        pump(connection)

    receive = FastPathProtocol.data_received

    def received(protocol: FastPathProtocol, data: bytes) -> None:
        read[-1] += 1
        receive(protocol, data)

    monkeypatch.setattr(TlsConnection, "_pump", counted)
    monkeypatch.setattr(FastPathProtocol, "data_received", received)
    request = post(NOW, b"x" * (3 * RECORDS_PER_TURN_MAX))
    async with await TlsWire.connect(front.port) as wire:
        for at in range(len(request)):
            wire.tls.write(request[at : at + 1])
        await wire._flush()
        assert (await wire.reply()).body == b"x" * (3 * RECORDS_PER_TURN_MAX)
    assert max(read) == RECORDS_PER_TURN_MAX
    assert sum(read) == len(request)


async def key_changing_client(front: Front) -> tuple[TlsWire, KeyChangingClient]:
    """Return a connected client, and its TLS state. It receives little before it reads."""
    wire = await Wire.connect(front.port, receive_bytes=4096)
    client = TlsWire(wire._sock)
    tls = KeyChangingClient(client._incoming, client._outgoing)
    client.tls = cast("ssl.SSLObject", tls)  # it has the methods that a wire calls
    await client.begin()
    await front.served.settled(1)
    return client, tls


@pytest.mark.needs("openssl")
async def test_changes_of_keys_beyond_those_of_a_turn_wait_for_the_next(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL alone would handle all of them at once, as they carry no data."""
    answers: list[int] = []
    flush = TlsTransport.flush

    def counted(transport: TlsTransport) -> bool:
        answers.append(transport._outgoing.pending)
        return flush(transport)

    client, tls = await key_changing_client(front)
    async with client:
        tls.update_keys(1)
        updates = 5 * RECORDS_PER_TURN_MAX
        answer_bytes = update_bytes = client._outgoing.pending
        monkeypatch.setattr(TlsTransport, "flush", counted)
        tls.update_keys(updates - 1)
        assert client._outgoing.pending == updates * update_bytes
        await client.send(post(NOW, b"works"))
        assert (await client.reply()).body == b"works"
    assert max(answers) <= RECORDS_PER_TURN_MAX * answer_bytes
    assert sum(answers) > 3 * RECORDS_PER_TURN_MAX * answer_bytes  # the others went with the reply


@pytest.mark.needs("openssl")
async def test_a_client_that_requests_new_keys_without_end_has_to_read_the_answers(front: Front) -> None:
    client, tls = await key_changing_client(front)
    async with client:
        transport = front.protocol.transport
        for end in (client._sock, transport.get_extra_info("socket")):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        # The kernel would let it grow to all that is sent.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        tls.update_keys(30_000)
        sent_bytes = client._outgoing.pending
        sending = asyncio.create_task(client._flush())
        connection = transport._tcp.get_protocol()
        await until(lambda: connection._answers_wait)
        for _ in range(1000):  # turns of the event loop, in which nothing more is read
            await asyncio.sleep(0)
        assert not sending.done()
        assert transport.get_write_buffer_size() < sent_bytes // 4
        reply = asyncio.create_task(client.reply())
        await sending
        await client.send(post(NOW, b"works"))
        assert (await reply).body == b"works"


async def test_handshake_and_request_in_segments_of_one_byte(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    async def flush(wire: TlsWire) -> None:
        records = wire._outgoing.read()
        await Wire.send(wire, *[records[at : at + 1] for at in range(len(records))])

    monkeypatch.setattr(TlsWire, "_flush", flush)
    await works(front)


async def test_many_requests_in_one_record(front: Front) -> None:
    async with await TlsWire.connect(front.port) as wire:
        await wire.send(b"".join(post(NOW, b"%d" % at) for at in range(50)))
        for at in range(50):
            assert (await wire.reply()).body == b"%d" % at


async def test_close_notify_ends_the_connection(front: Front) -> None:
    async with await TlsWire.connect(front.port) as wire:
        await wire.send(post(NOW, b"works"))
        await wire.reply()
        with pytest.raises(ssl.SSLWantReadError):
            wire.tls.unwrap()
        await wire._flush()
        await wire._receive()
        wire.tls.unwrap()  # raises unless the server has sent close_notify
        await front.served.settled(0)


async def test_the_last_reply_is_followed_by_close_notify(front: Front) -> None:
    async with await TlsWire.connect(front.port) as wire:
        await wire.send(post(NOW, b"works", "Connection: close"))
        assert (await wire.reply()).body == b"works"
        with pytest.raises(EOFError):
            await wire._more()
        wire._incoming.write_eof()
        assert wire.tls.read(1) == b""  # an end without close_notify raises SSLEOFError


async def test_a_large_reply_is_encrypted_as_the_client_reads(front: Front) -> None:
    body = bytes(range(256)) * (1 << 16)
    async with await TlsWire.connect(front.port, receive_bytes=65536) as wire:
        await wire.send(post(PATH))
        request = await front.held.next()
        request.done(HttpReply(200, reply_headers(), body))
        transport = front.protocol.transport
        encrypted = transport._tcp.get_write_buffer_size()
        assert encrypted < 2 * PIECE_BYTES
        assert transport.get_write_buffer_size() > len(body) // 2
        assert front.reply_budget.bytes > len(body) // 2
        reply = await wire.reply()
        assert hashlib.sha256(reply.body).digest() == hashlib.sha256(body).digest()


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_session_is_resumed(front: Front, version: ssl.TLSVersion) -> None:
    context = client_context()
    context.maximum_version = version
    session = None
    for resumed in (False, True):
        async with await client_of(front, context, session) as client:
            await client.begin()
            await client.send(post(NOW, b"works"))
            assert (await client.reply()).body == b"works"
            assert client.tls.session_reused is resumed
            session = client.tls.session


@pytest.mark.parametrize("offered", [["h2"], ["h2", "http/1.1"], ["http/1.1"], []])
async def test_the_protocol_is_http_1_1(front: Front, offered: list[str]) -> None:
    context = client_context()
    if offered:
        context.set_alpn_protocols(offered)
    async with await client_of(front, context) as client:
        await client.begin()
        assert client.tls.selected_alpn_protocol() == ("http/1.1" if "http/1.1" in offered else None)
        await client.send(post(NOW, b"works"))
        assert (await client.reply()).body == b"works"


async def test_older_versions_are_refused(front: Front) -> None:
    hello = bytes.fromhex(  # of TLS 1.0: version, 32 random bytes, no session, one cipher suite, no compression
        "16030100" + "2d" + "01000029" + "0301" + "00" * 32 + "00" + "0002" + "c013" + "0100"
    )
    async with await Wire.connect(front.port) as wire:
        await wire.send(hello)
        alert = await wire.rest()
        assert (alert[0], alert[5:7]) == (21, b"\x02\x46")  # protocol_version


def _needing_certificates() -> dict[str, Any]:
    files = TlsFiles(FILES.certificate, FILES.key, CERTIFICATES / "ca.pem")
    return {"context": lambda: load_identity(files).context}


@pytest.mark.parametrize("options", [_needing_certificates()])
@pytest.mark.parametrize("version", VERSIONS)
async def test_a_client_without_a_certificate_is_told_so(front: Front, version: ssl.TLSVersion) -> None:
    context = client_context()
    context.maximum_version = version
    async with await client_of(front, context) as client:
        with pytest.raises(ssl.SSLError, match="ALERT"):  # with TLS 1.3 when it reads the reply
            await client.begin()
            await client.send(post(PATH, bytes(1 << 20)))
            await client.reply()
    assert front.held.empty


async def test_handshakes_are_aborted_when_the_gateway_drains(handshakes: Handshakes, front: Front) -> None:
    async with await Wire.connect(front.port) as wire:
        await until(lambda: len(handshakes) == 1)
        handshakes.abort()
        assert not handshakes
        assert await wire.rest() == b""
