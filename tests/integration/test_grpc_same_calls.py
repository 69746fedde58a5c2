"""A thousand calls, played against both gRPC servers, without keys and with: the same bytes, statuses and metadata."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2 as pb

from tests.kit import models
from tests.kit.grpc_calls import KINDS, Call, Outcome, calls, played
from tests.kit.grpc_library import library_gateway
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

SEED, COUNT = 9113, 1000
EMPTY = Call("ModelInfer", (b"",))
READY = Call("ModelReady", (pb.ModelReadyRequest(name="wide").SerializeToString(),))
IS_READY = (pb.ModelReadyResponse(ready=True).SerializeToString(),)


def test_both_servers_answer_each_of_many_calls_alike(tmp_path: Path) -> None:
    with running_stack(tmp_path, settings={"admin_key": "the-admin-key-of-this-test"}) as stack:
        stack.push("add", models.add_sub(tmp_path / "add.onnx"))
        stack.push("kinds", models.identities(tmp_path / "kinds.onnx", datatypes=KINDS))
        stack.push("wide", models.identity(tmp_path / "wide.onnx", shape=("N", "M")))
        with library_gateway(stack) as library:
            both = library, stack.grpc
            wait_for(both, READY, lambda outcome: outcome.messages == IS_READY)
            recorded = calls(SEED, COUNT)
            codes = assert_alike(both, recorded)
            assert codes["OK"] > COUNT / 2, codes
            assert codes.keys() >= {"NOT_FOUND", "INVALID_ARGUMENT", "UNIMPLEMENTED"}
            keys = create_keys(stack)
            wait_for(both, EMPTY, needs_key)
            chance = random.Random(SEED)
            codes = assert_alike(both, [with_key(call, name_of_key(chance, call), keys) for call in recorded])
            assert codes["OK"] > COUNT / 3, codes
            assert codes.keys() >= {"NOT_FOUND", "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED"}
            assert stack.http.delete("/admin/v1/keys/every").status_code == 200
            outcome = wait_for(both, with_key(EMPTY, "every", keys), needs_key)
            assert outcome.details == "the key was revoked"


def needs_key(outcome: Outcome) -> bool:
    return outcome.code is grpc.StatusCode.UNAUTHENTICATED


def wait_for(both: tuple[str, str], call: Call, wanted: Callable[[Outcome], bool]) -> Outcome:
    """Wait until both servers answer a call as wanted: each gateway learns by itself about models and keys."""

    def answered(target: str) -> Outcome | None:
        [outcome] = asyncio.run(played(target, [call]))
        return outcome if wanted(outcome) else None

    for target in both:
        outcome = wait_until(lambda: answered(target), what=f"{target} answers so")  # noqa: B023
    return outcome


def assert_alike(both: tuple[str, str], sent: Sequence[Call]) -> Counter[str]:
    """Play the calls, and return how many of them had which status."""
    expected, answered = (asyncio.run(played(target, sent)) for target in both)
    for call, theirs, ours in zip(sent, expected, answered, strict=True):
        assert ours == theirs, call
    return Counter(outcome.code.name for outcome in expected)


def create_keys(stack: Stack) -> dict[str, str]:
    """Create keys, and return them by name, with one that is wrong."""
    made = {}
    for name, scope in (("every", "infer:*"), ("wide", "infer:wide")):
        reply = stack.http.post("/admin/v1/keys", json={"name": name, "scopes": [scope]})
        assert reply.status_code == 201, reply.text
        made[name] = reply.json()["key"]
    return {**made, "wrong": made["wide"][:-4] + "0000"}


def name_of_key(chance: random.Random, call: Call) -> str:
    """Return the name of a key for a call; "": none."""
    # grpc.aio's client fails by itself now and then when a stream is refused to which it still writes.
    weights = (8, 2, 0, 0) if call.method == "ModelStreamInfer" else (8, 2, 1, 1)
    return chance.choices(("every", "wide", "wrong", ""), weights)[0]


def with_key(call: Call, name: str, keys: Mapping[str, str]) -> Call:
    """Return a call with a key; `name` "": with none."""
    if not name:
        return call
    key = keys[name]
    header = ("x-api-key", key) if name == "wide" else ("authorization", f"Bearer {key}")
    return call._replace(metadata=(*call.metadata, header))
