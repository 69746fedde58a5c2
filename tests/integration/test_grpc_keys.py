"""Keys over gRPC, call by call on both servers: the same answers, counts and limits.

keys change ─> the first call goes to the handler, which verifies its key ─> the connection answers the others itself
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.access.access_control import counters_of
from millstream.gateway.access.gate import Gate
from millstream.gateway.connection.drain import Drain
from millstream.gateway.grpc.connections.message_framing import prefix
from millstream.gateway.grpc.fast_infer import FastRequest
from millstream.gateway.grpc.server import GrpcServer
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.scheduling.request import Request
from millstream.services.access.document import KeyDocument, Limits, StoredSecret
from millstream.services.access.secret import derive_secret, format_key, hash_secret
from millstream.services.errors import Code
from millstream.services.metrics.catalogue import GRPC_CALLS, KEY_REQUESTS, REQUESTS
from millstream.services.wire.batch import ReplyHeader, decode_batch, encode_reply
from tests.integration.test_grpc_fast import connected, to, until
from tests.kit.application import Application
from tests.kit.grpc_library import LibraryServer
from tests.kit.loopback import Loopback

pytestmark = pytest.mark.anyio

ID = "0123456789abcdef"
OLD, NEW = (derive_secret(b"s" * 32, ID, salt) for salt in ("old", "new"))
ADMIN = "the-admin-key-of-this-test"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
WAIT_S = 120.0
#: instant at which keys begin to be checked; tests set the clock of expiries
NOW = 1000.0
CALLS_EACH = 3  # the first after a change of keys goes to the handler, the others need not
Metadata = tuple[tuple[str, str], ...]


def bearer(secret: str = OLD, key_id: str = ID) -> Metadata:
    return (("authorization", f"Bearer {format_key(key_id, secret)}"),)


def stored(secret: str, expires_at: float | None = None) -> StoredSecret:
    return StoredSecret(sha256=hash_secret(secret), salt="salt", created_at=0, expires_at=expires_at)


def document(*scopes: str, **changed: Any) -> KeyDocument:
    fields = {"id": ID, "name": "k", "scopes": scopes or ("infer:m",), "created_at": 0, "secrets": (stored(OLD),)}
    return KeyDocument.model_validate(fields | changed)


def message(model: str = "m", rows: int = 1) -> Any:
    x = np.ones((rows, 4), np.float32)
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[x.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=x.shape)
    return request


class Serving(Application):
    """An application whose model `m` a loopback serves."""

    def __init__(self, home: Path, gate: Gate, loopback: Loopback) -> None:
        self._loopback = loopback
        super().__init__(home, gate, grpc_port=0)

    def _find(self, model: str, version: str | None) -> ModelRoute:
        return self._loopback.lanes.find(model, version)


class Outcome(NamedTuple):
    """What the client sees of a call."""

    code: str
    details: str
    trailing: tuple[tuple[str, str], ...]


class Keyed:
    """A server with keys, and a client. `now`: the time by which keys expire."""

    def __init__(self, home: Path) -> None:
        self.now = NOW
        self.loopback = Loopback(home / "loopback")
        counter = self.loopback.tally.counter
        self.gate = Gate(ADMIN, lambda name: counters_of(counter, name), lambda: self.now)
        self.application = Serving(home, self.gate, self.loopback)
        self.server: GrpcServer | LibraryServer
        self.infer: Any

    def start_call(self, metadata: Metadata = (), model: str = "m", rows: int = 1, timeout_s: float = WAIT_S) -> Any:
        return self.infer(message(model, rows), metadata=metadata, timeout=timeout_s)

    async def call(self, metadata: Metadata = (), model: str = "m", rows: int = 1) -> Outcome:
        """Return what the client sees of a call, without the request id."""
        running = self.start_call(metadata, model, rows)
        code = await running.code()
        trailing = [(name, value) for name, value in await running.trailing_metadata() if name != "x-request-id"]
        return Outcome(code.name, await running.details(), tuple(trailing))

    async def held_request(self) -> Request:
        """Wait for the only batch that is held, and return its request."""
        await until(lambda: bool(self.loopback.link.waiting))
        [batch] = self.loopback.producer.lanes.pending.values()
        [request] = batch.requests
        return request

    @property
    def in_flight(self) -> int:
        """The calls of the key that count for its limit on concurrency."""
        return self.gate.accounts()[ID].in_flight

    @property
    def admitted(self) -> int:
        return self.loopback.admission.requests


@asynccontextmanager
async def keyed(home: Path, kind: type[GrpcServer | LibraryServer] = GrpcServer) -> AsyncIterator[Keyed]:
    made = Keyed(home)
    await made.loopback.open()
    made.server = server = kind(made.application.app.state.deps, Drain(), shared=False)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            made.infer = channel.unary_unary(
                METHOD, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
            )
            yield made
    finally:
        await server.close()
    budgets = (made.loopback.reply_budget, made.application.reply_budget)
    # The last call's handler may end after its client has the reply.
    await until(lambda: (made.admitted, *(budget.bytes for budget in budgets)) == (0, 0, 0))


class Step(NamedTuple):
    """Calls with the same key. `keys`: those that there are from then on; None: as before."""

    codes: str  # of CALLS_EACH calls; one: of each
    keys: KeyDocument | None = None
    metadata: Metadata = bearer()
    model: str = "m"
    rows: int = 1
    now: float = NOW


LIMITED = "OK RESOURCE_EXHAUSTED RESOURCE_EXHAUSTED"
#: far slower than these tests, so that a used limit stays used
PER_S = 0.001
STEPS = {
    "right": Step("OK", document()),
    "x-api-key": Step("OK", metadata=(("x-api-key", format_key(ID, OLD)),)),
    "both, the wrong one counts": Step("UNAUTHENTICATED", metadata=(*bearer(NEW), ("x-api-key", format_key(ID, OLD)))),
    "with a request id": Step("OK", metadata=(*bearer(), ("x-request-id", "mine"))),
    "the admin key": Step("OK", metadata=(("authorization", f"Bearer {ADMIN}"),)),
    "none": Step("UNAUTHENTICATED", metadata=()),
    "wrong": Step("UNAUTHENTICATED", metadata=bearer(NEW)),
    "of another id": Step("UNAUTHENTICATED", metadata=bearer(key_id="f" * 16)),
    "no key at all": Step("UNAUTHENTICATED", metadata=(("authorization", "Bearer abc"),)),
    "an empty one": Step("UNAUTHENTICATED", metadata=(("authorization", ""),)),
    "an empty bearer": Step("UNAUTHENTICATED", metadata=(("authorization", "Bearer "),)),
    "blanks": Step("UNAUTHENTICATED", metadata=(("x-api-key", "  "),)),
    "two, both right": Step("UNAUTHENTICATED", metadata=(*bearer(), *bearer())),
    "two, the first right": Step("UNAUTHENTICATED", metadata=(*bearer(), *bearer(NEW))),
    "two, the second right": Step("UNAUTHENTICATED", metadata=(*bearer(NEW), *bearer())),
    "two of x-api-key": Step("UNAUTHENTICATED", metadata=(("x-api-key", format_key(ID, OLD)),) * 2),
    "right, with blanks around it": Step("OK", metadata=(("authorization", f"  Bearer {format_key(ID, OLD)} "),)),
    "a signature": Step("UNAUTHENTICATED", metadata=(("authorization", "AWS4-HMAC-SHA256 Credential=x"),)),
    "another model": Step("PERMISSION_DENIED", model="other"),
    "any model, of which there is none": Step("NOT_FOUND", document("infer:*"), model="other"),
    "the scope is gone": Step("PERMISSION_DENIED", document("infer:o*")),
    "scopes of other kinds": Step("PERMISSION_DENIED", document("models:write", "metrics")),
    "before it expires": Step("OK", document(expires_at=NOW + 9), now=NOW + 8),
    "it expires": Step("UNAUTHENTICATED", now=NOW + 9),
    "before it is revoked": Step("OK", document()),
    "revoked": Step("UNAUTHENTICATED", document(revoked_at=NOW, secrets=())),
    "rotated, the old one": Step("OK", document(secrets=(stored(OLD, NOW + 9), stored(NEW)))),
    "rotated, the new one": Step("OK", metadata=bearer(NEW)),
    "rotated, the old one after its time": Step("UNAUTHENTICATED", now=NOW + 9),
    "rotated, the new one still": Step("OK", metadata=bearer(NEW), now=NOW + 9),
    "calls": Step(LIMITED, document(limits=Limits(requests_per_s=PER_S))),
    "rows": Step(LIMITED, document(limits=Limits(rows_per_s=PER_S)), rows=2),
    "more rows than any wait is for": Step("RESOURCE_EXHAUSTED", document(limits=Limits(rows_per_s=PER_S / 2)), rows=8),
    "limits that are not reached": Step("OK", document(limits=Limits(requests_per_s=1e6, rows_per_s=1e6))),
}
_NUMBER = re.compile(r"\d[\d.]*(e\+\d+)?")


async def played(home: Path, kind: type[GrpcServer | LibraryServer]) -> tuple[list[Any], list[Any]]:
    """Return what became of the calls of all steps, and what was counted. Waits of limits differ from run to run."""
    outcomes: list[Any] = []
    async with keyed(home, kind) as made:
        for step in STEPS.values():
            if step.keys is not None:
                made.gate.load([step.keys])
            made.now = step.now
            for _ in range(CALLS_EACH):
                code, details, trailing = await made.call(step.metadata, step.model, step.rows)
                masked = tuple((name, _NUMBER.sub("#", str(value))) for name, value in trailing)
                outcomes.append((code, _NUMBER.sub("#", details), masked))
        calls, tally = made.application.registry, made.loopback.tally
        # The library counts a call after its client has the status.
        await until(lambda: sum(calls.counts(GRPC_CALLS).values()) == len(outcomes))
        return outcomes, [calls.counts(GRPC_CALLS), tally.counts(KEY_REQUESTS), tally.counts(REQUESTS)]


async def test_both_servers_answer_and_count_calls_with_keys_alike(tmp_path: Path) -> None:
    expected, expected_counts = await played(tmp_path / "library", LibraryServer)
    answered, counts = await played(tmp_path / "own", GrpcServer)
    for at, (name, step) in enumerate(STEPS.items()):
        theirs, ours = (found[at * CALLS_EACH : (at + 1) * CALLS_EACH] for found in (expected, answered))
        codes = step.codes.split()
        assert [code for code, *_ in theirs] == (codes if len(codes) > 1 else codes * CALLS_EACH), (name, theirs)
        assert ours == theirs, name
    assert counts == expected_counts
    limited = answered[[*STEPS].index("calls") * CALLS_EACH + 2]
    assert {"retry-after", "grpc-retry-pushback-ms", "ratelimit", "ratelimit-policy"} == dict(limited[2]).keys()


async def test_a_known_key_needs_no_handler_and_its_priority_is_bounded(tmp_path: Path) -> None:
    """A change of the keys makes every key unknown again."""
    async with keyed(tmp_path) as made:
        link = made.loopback.link
        link.held = True
        for change in range(2):
            made.gate.load([document(priority_max=3 + change)])
            for known in (False, True, True):
                running = made.start_call(bearer())
                request = await made.held_request()
                # The envelope, too, is known after the first call of all.
                assert isinstance(request, FastRequest) is known
                assert request.priority == 3 + change
                link.run_held()
                await running


async def answered(made: Keyed, running: Any) -> None:
    made.loopback.link.run_held()
    assert await running.code() is grpc.StatusCode.OK


async def failed(made: Keyed, running: Any) -> None:
    link = made.loopback.link
    [(entry, _)], link.waiting = link.waiting, []
    name = decode_batch(entry)[0].name
    failures = {0: [Code.MODEL.value, "no"]}
    link._on_reply(encode_reply(ReplyHeader(name, "w", 0.0, 0.0, 0.0, 0.0, 1, [], failures, [], ""), []))
    assert await running.code() is grpc.StatusCode.INTERNAL


async def cancelled(made: Keyed, running: Any) -> None:
    running.cancel()
    await outlived(made)


async def outlived(made: Keyed) -> None:
    """The call ends at once, but its run counts until it has ended."""
    await until(lambda: made.admitted == 0)
    assert made.in_flight == 1
    made.loopback.link.run_held()


@pytest.mark.parametrize("end", [answered, failed, cancelled])
async def test_a_call_counts_for_concurrency_until_it_ends(tmp_path: Path, end: Callable[[Keyed, Any], Any]) -> None:
    async with keyed(tmp_path) as made:
        await learn(made)
        running = made.start_call(bearer())
        await made.held_request()
        refused = await made.call(bearer())
        assert (refused.code, "1 calls at once" in refused.details) == ("RESOURCE_EXHAUSTED", True), refused
        assert made.in_flight == 1
        await end(made, running)
        await free(made)


async def learn(made: Keyed) -> None:
    """Have the key and the envelope known; then hold the batches."""
    made.gate.load([document(limits=Limits(concurrency=1))])
    for _ in range(CALLS_EACH):
        assert (await made.call(bearer())).code == "OK"
        await until(lambda: made.in_flight == 0)
    made.loopback.link.held = True


async def free(made: Keyed) -> None:
    """No call counts any more, and another is let in."""
    await until(lambda: made.in_flight == 0)
    made.loopback.link.held = False
    assert (await made.call(bearer())).code == "OK"
    await until(lambda: made.in_flight == 0)


async def test_a_call_whose_deadline_passes_ends_for_concurrency_with_its_run(tmp_path: Path) -> None:
    async with keyed(tmp_path) as made:
        await learn(made)
        for timeout_s in (2.0, 10.0, 60.0):  # a machine that is held up may not take a call in time
            running = made.start_call(bearer(), timeout_s=timeout_s)
            await until(lambda: bool(made.loopback.link.waiting) or running.done())  # noqa: B023
            if made.loopback.link.waiting:
                break
        assert await running.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await outlived(made)
        await free(made)


@pytest.mark.parametrize("what", ["the connection", "the stream"])
async def test_a_call_whose_client_vanishes_ends_for_concurrency_with_its_run(tmp_path: Path, what: str) -> None:
    body = message().SerializeToString()
    headers = [*to("ModelInfer"), *bearer()]
    async with keyed(tmp_path) as made, connected(made.server) as client:
        await learn(made)
        client.begin(1, headers)
        client.give(1, prefix(len(body)) + body)
        await made.held_request()
        if what == "the connection":
            client.abort()
        else:
            client.reset(1)
        await outlived(made)
        await free(made)


async def test_a_call_that_the_gateway_refuses_is_not_counted_for_concurrency(tmp_path: Path) -> None:
    async with keyed(tmp_path) as made:
        await learn(made)
        made.loopback.admission.closed = True
        assert (await made.call(bearer())).code == "UNAVAILABLE"
        made.loopback.admission.closed = False
        await free(made)


@pytest.mark.parametrize("key", [bearer(NEW), ()], ids=["wrong", "none"])
async def test_a_call_without_a_right_key_is_refused_before_its_message_comes(tmp_path: Path, key: Metadata) -> None:
    async with keyed(tmp_path) as made, connected(made.server) as client:
        made.gate.load([document()])
        client.begin(1, [*to("ModelInfer"), *key])
        assert (await client.reply(1))["grpc-status"] == str(grpc.StatusCode.UNAUTHENTICATED.value[0])


@pytest.mark.parametrize("learned", [True, False], ids=["fast", "first call"])
async def test_a_key_that_is_revoked_while_its_message_comes_is_refused(tmp_path: Path, learned: bool) -> None:
    body = message().SerializeToString()
    async with keyed(tmp_path) as made, connected(made.server) as client:
        if learned:
            await learn(made)
        else:
            made.gate.load([document()])
        client.begin(1, [*to("ModelInfer"), *bearer()])
        client.give(1, prefix(len(body)), end=False)
        server = made.server
        assert isinstance(server, GrpcServer)
        await until(lambda: server.calls == 1)
        made.gate.load([document(revoked_at=NOW, secrets=())])
        client.give(1, body)
        fields = await client.reply(1)
        assert fields["grpc-status"] == str(grpc.StatusCode.UNAUTHENTICATED.value[0])
        assert fields["grpc-message"].startswith("the key was revoked")
