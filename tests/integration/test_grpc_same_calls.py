"""A thousand calls, played against both gRPC servers, without keys and with: the same bytes, statuses and metadata."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from tests.kit import models
from tests.kit.grpc_calls import KINDS, Call, Outcome, calls, played
from tests.kit.stack import Stack, running_stack

SEED, COUNT = 9113, 1000
SETTINGS = {"admin_key": "the-admin-key-of-this-test"}
ADD = Call("ModelInfer", (b"",))
_ID = re.compile(rb"key [0-9a-f]{16}")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Stack]]:
    """The library's server, then the one on our own connections; each with a worker."""
    one, other = tmp_path_factory.mktemp("library"), tmp_path_factory.mktemp("fast")
    with (
        running_stack(one, settings={"grpc": "library", **SETTINGS}) as library,
        running_stack(other, settings={"grpc": "fast", **SETTINGS}) as fast,
    ):
        for stack in (library, fast):
            stack.push("add", models.add_sub(one / "add.onnx"))
            stack.push("kinds", models.identities(one / "kinds.onnx", datatypes=KINDS))
            stack.push("wide", models.identity(one / "wide.onnx", shape=("N", "M")))
        yield library, fast


def test_both_servers_answer_each_of_many_calls_alike(both: tuple[Stack, Stack]) -> None:
    recorded = calls(SEED, COUNT)
    codes = assert_alike(both, recorded, recorded)
    assert codes["OK"] > COUNT / 2, codes
    assert codes.keys() >= {"NOT_FOUND", "INVALID_ARGUMENT", "UNIMPLEMENTED"}
    # From now on each call needs a key: no other test may use these stacks.
    keys = [create_keys(stack) for stack in both]
    chance = random.Random(SEED)
    names = [name_of_key(chance, call) for call in recorded]
    sent = [
        [with_key(call, name, given[name] if name else "") for call, name in zip(recorded, names, strict=True)]
        for given in keys
    ]
    codes = assert_alike(both, *sent)
    assert codes["OK"] > COUNT / 3, codes
    assert codes.keys() >= {"NOT_FOUND", "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED"}
    for stack, given in zip(both, keys, strict=True):
        assert stack.http.delete("/admin/v1/keys/every").status_code == 200
        [outcome] = asyncio.run(played(stack.grpc, [with_key(ADD, "every", given["every"])]))
        assert (outcome.code.name, outcome.details) == ("UNAUTHENTICATED", "the key was revoked")


def assert_alike(both: tuple[Stack, Stack], to_library: Sequence[Call], to_fast: Sequence[Call]) -> Counter[str]:
    """Play the calls, and return how many of them had which status."""
    library, fast = both
    expected = asyncio.run(played(library.grpc, to_library, lossy=True))
    answered = asyncio.run(played(fast.grpc, to_fast))
    for call, theirs, ours in zip(to_fast, expected, answered, strict=True):
        assert masked(ours) == masked(theirs), call
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


def with_key(call: Call, name: str, key: str) -> Call:
    """Return a call with a key; `name` "": with none."""
    header = ("x-api-key", key) if name == "wide" else ("authorization", f"Bearer {key}")
    return call._replace(metadata=(*call.metadata, header)) if name else call


def masked(outcome: Outcome) -> Outcome:
    """Return an outcome without ids of keys, which differ."""
    messages = tuple(_ID.sub(b"key", message) for message in outcome.messages)
    return outcome._replace(messages=messages, details=_ID.sub(b"key", outcome.details.encode()).decode())
