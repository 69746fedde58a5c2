"""A TLS 1.2 client that asks for a new handshake again and again is refused each time, at a bounded cost."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from millstream.gateway.connection.tls_connection import RECORDS_PER_TURN_MAX
from millstream.gateway.connection.tls_transport import TlsTransport
from tests.kit import wire as kit
from tests.kit.renegotiation import ALERT, DATA, NO_RENEGOTIATION, Record, Renegotiator
from tests.kit.servers import Front, fronting
from tests.kit.tls_wire import TlsWire, over_tls
from tests.kit.wire import PATIENCE_S, post, until

pytestmark = [pytest.mark.anyio, pytest.mark.needs("openssl")]
NOW = "/v2/models/now/infer"
HELLOS = 10_000  # far more than buffers hold the refusals of


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kit, "below", functools.partial(over_tls, handshake_s_max=PATIENCE_S * 2))
        async with fronting(tmp_path) as front:
            yield front


@pytest.fixture
async def client(front: Front, tmp_path: Path) -> AsyncIterator[Renegotiator]:
    made = await Renegotiator.connect(front.port, tmp_path, receive_bytes=4096)
    await front.served.settled(1)
    yield made
    made.close()


async def assert_works(client: Renegotiator) -> None:
    """A request on this connection is answered; refusals that come before are read."""
    await client.write(post(NOW, b"works"))
    while (found := await client.record()).kind != DATA:
        assert found == Record(ALERT, NO_RENEGOTIATION)
    assert found.content.startswith(b"HTTP/1.1 200 ")
    assert found.content.endswith(b"\r\n\r\nworks")


async def test_each_request_is_refused_and_the_connection_goes_on(client: Renegotiator) -> None:
    await client.send(client.hellos(5))
    assert [await client.record() for _ in range(5)] == [Record(ALERT, NO_RENEGOTIATION)] * 5
    await assert_works(client)
    await client.send(client.hellos(1))
    assert await client.record() == Record(ALERT, NO_RENEGOTIATION)
    await assert_works(client)


async def test_requests_beyond_those_of_a_turn_wait_for_the_next(
    client: Renegotiator, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[int] = []
    flush = TlsTransport.flush

    def counted(transport: TlsTransport) -> bool:
        answers.append(transport._outgoing.pending)
        return flush(transport)

    monkeypatch.setattr(TlsTransport, "flush", counted)
    await client.send(client.hellos(1))
    await client.record()
    [answer_bytes] = filter(None, answers)
    answers.clear()
    await client.send(client.hellos(5 * RECORDS_PER_TURN_MAX))
    for _ in range(5 * RECORDS_PER_TURN_MAX):
        assert await client.record() == Record(ALERT, NO_RENEGOTIATION)
    assert max(answers) <= RECORDS_PER_TURN_MAX * answer_bytes
    assert sum(answers) == 5 * RECORDS_PER_TURN_MAX * answer_bytes


async def test_a_client_that_reads_no_refusals_is_read_no_further_and_others_are_served(
    front: Front, client: Renegotiator
) -> None:
    transport = front.protocol.transport
    server_socket = transport.get_extra_info("socket")
    for end in (client.sock, server_socket):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    # The kernel would let it grow to all that is sent.
    server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    records = client.hellos(HELLOS)
    sending = asyncio.create_task(client.send(records))
    connection = transport._tcp.get_protocol()
    await until(lambda: connection._answers_wait)
    async with await TlsWire.connect(front.port) as other:
        await other.send(post(NOW, b"mine"))
        assert (await other.reply()).body == b"mine"
    for _ in range(1000):  # turns of the event loop, in which nothing more is read
        await asyncio.sleep(0)
    assert not sending.done()
    assert transport.get_write_buffer_size() < len(records) // 4
    for end in (client.sock, server_socket):  # else the refusals come at 0.3 a millisecond
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    for _ in range(HELLOS):
        assert await client.record() == Record(ALERT, NO_RENEGOTIATION)
    await sending
    await assert_works(client)
