from __future__ import annotations

import gc
import weakref

from millstream.services.process.process_memory import (
    CHECKS_IDLE,
    CHECKS_QUIET,
    GROWN_BYTES_MIN,
    RETRIES,
    RETRY_CHECKS,
    IdleTrim,
    trim,
)

START = 100 << 20


def looks(policy: IdleTrim, *, idle: bool, quiet: bool) -> int:
    """How many looks it takes until it is due."""
    return next(i for i in range(1, 100) if policy.due(idle=idle, quiet=quiet))


def test_memory_goes_back_once_after_a_burst() -> None:
    policy = IdleTrim(START)
    assert not policy.due(idle=False, quiet=False)
    assert looks(policy, idle=True, quiet=True) == CHECKS_IDLE
    assert policy.grown(START + GROWN_BYTES_MIN)
    policy.trimmed(START + 5)
    assert not policy.grown(START + GROWN_BYTES_MIN), "what stayed is in use"
    assert looks(policy, idle=True, quiet=True) == CHECKS_IDLE


def test_a_little_traffic_delays_it() -> None:
    policy = IdleTrim(START)
    assert looks(policy, idle=False, quiet=True) == CHECKS_QUIET
    assert not policy.due(idle=False, quiet=False)
    assert looks(policy, idle=False, quiet=True) == CHECKS_QUIET


def test_a_process_that_shrank_may_grow_as_much_again() -> None:
    policy = IdleTrim(START)
    assert not policy.grown(START // 2)
    assert policy.grown(START // 2 + GROWN_BYTES_MIN)


def test_what_a_library_frees_late_goes_back_too() -> None:
    """Its pages stay resident when they are freed: only another trim shows that they are not in use."""
    policy = IdleTrim(START)
    peak = START + 2 * GROWN_BYTES_MIN
    assert looks(policy, idle=True, quiet=True)
    assert policy.grown(peak)
    policy.trimmed(peak)  # the library still held all of it
    trims = []
    for look in range(1, 10 * RETRY_CHECKS * 4**RETRIES):
        if policy.due(idle=True, quiet=True) and policy.grown(peak):
            policy.trimmed(peak)
            trims.append(look)
    assert len(trims) == RETRIES
    assert trims == [4, 4 + 16, 4 + 16 + 64]
    assert policy.grown(peak + GROWN_BYTES_MIN), "another burst"


def test_nothing_is_tried_again_when_all_went_back() -> None:
    policy = IdleTrim(START)
    assert policy.grown(START + GROWN_BYTES_MIN)
    policy.trimmed(START + 5)
    for _ in range(1000):
        policy.due(idle=True, quiet=True)
        assert not policy.grown(START + 5)


def test_trimming_collects_the_cycles_that_hold_memory() -> None:
    """The collector does not run by itself in a process without traffic."""

    class Held:
        cycle: object

    held = Held()
    held.cycle = held
    gone = weakref.ref(held)
    gc.disable()
    try:
        del held
        assert gone() is not None
        trim()
        assert gone() is None
    finally:
        gc.enable()
