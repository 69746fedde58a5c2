from __future__ import annotations

from millstream.services.process.allocator import GROWN_BYTES_MIN, LOOKS_IDLE, LOOKS_QUIET, IdleTrim

START = 100 << 20


def looks(policy: IdleTrim, *, idle: bool, quiet: bool) -> int:
    """How many looks it takes until it is due."""
    return next(i for i in range(1, 100) if policy.due(idle=idle, quiet=quiet))


def test_memory_goes_back_once_after_a_burst() -> None:
    policy = IdleTrim(START)
    assert not policy.due(idle=False, quiet=False)
    assert looks(policy, idle=True, quiet=True) == LOOKS_IDLE
    assert policy.grown(START + GROWN_BYTES_MIN)
    policy.trimmed(START + 5)
    assert not policy.grown(START + GROWN_BYTES_MIN), "what stayed is in use"
    assert looks(policy, idle=True, quiet=True) == LOOKS_IDLE


def test_a_little_traffic_delays_it() -> None:
    policy = IdleTrim(START)
    assert looks(policy, idle=False, quiet=True) == LOOKS_QUIET
    assert not policy.due(idle=False, quiet=False)
    assert looks(policy, idle=False, quiet=True) == LOOKS_QUIET


def test_a_process_that_shrank_may_grow_as_much_again() -> None:
    policy = IdleTrim(START)
    assert not policy.grown(START // 2)
    assert policy.grown(START // 2 + GROWN_BYTES_MIN)
