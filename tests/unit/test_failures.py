"""When a refused client may try again: every refusal says so, in whole seconds, at least one."""

from __future__ import annotations

import pytest

from millstream.gateway.connection.error_reply import error_reply
from millstream.services.errors import RETRY_S_DEFAULT, Code, Failure


@pytest.mark.parametrize(
    ("retry_after_s", "seconds"),
    [(0.0, 1), (1e-9, 1), (0.4, 1), (1, 1), (1.2, 2), (30.0, 30), (-3.0, 1), (None, RETRY_S_DEFAULT)],
)
@pytest.mark.parametrize("code", [Code.OVERLOADED, Code.UNAVAILABLE, Code.MEMORY])
def test_a_refusal_has_whole_seconds(code: Code, retry_after_s: float | None, seconds: int) -> None:
    failure = Failure(code, "full", retry_after_s=retry_after_s)
    assert failure.retry_after == seconds
    assert (b"retry-after", b"%d" % seconds) in error_reply(failure).headers.pairs


@pytest.mark.parametrize("code", sorted(set(Code) - {Code.OVERLOADED, Code.UNAVAILABLE, Code.MEMORY}))
def test_other_failures_have_none(code: Code) -> None:
    failure = Failure(code, "wrong")
    assert failure.retry_after is None
    assert not [pair for pair in error_reply(failure).headers.pairs if pair[0] == b"retry-after"]
