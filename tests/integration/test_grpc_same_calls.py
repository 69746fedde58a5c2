"""A thousand calls, played against both gRPC servers: the same bytes, statuses, details and metadata."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.kit import models
from tests.kit.grpc_calls import KINDS, calls, played
from tests.kit.stack import Stack, running_stack

SEED, COUNT = 9113, 1000


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Stack]]:
    """The library's server, then the one on our own connections; each with a worker."""
    one, other = tmp_path_factory.mktemp("library"), tmp_path_factory.mktemp("fast")
    with (
        running_stack(one, settings={"grpc": "library"}) as library,
        running_stack(other, settings={"grpc": "fast"}) as fast,
    ):
        for stack in (library, fast):
            stack.push("add", models.add_sub(one / "add.onnx"))
            stack.push("kinds", models.identities(one / "kinds.onnx", datatypes=KINDS))
            stack.push("wide", models.identity(one / "wide.onnx", shape=("N", "M")))
        yield library, fast


def test_both_servers_answer_each_of_many_calls_alike(both: tuple[Stack, Stack]) -> None:
    recorded = calls(SEED, COUNT)
    library, fast = both
    expected = asyncio.run(played(library.grpc, recorded, lossy=True))
    answered = asyncio.run(played(fast.grpc, recorded))
    for call, theirs, ours in zip(recorded, expected, answered, strict=True):
        assert ours == theirs, call
    codes = Counter(outcome.code.name for outcome in expected)
    assert codes["OK"] > COUNT / 2, codes
    assert codes.keys() >= {"NOT_FOUND", "INVALID_ARGUMENT", "UNIMPLEMENTED"}
