"""Whether several lanes are in use."""

from __future__ import annotations

from millstream.gateway.scheduling.batching.dispatch import IN_USE_S, Contention


def test_a_lane_is_not_beside_itself():
    neighbours = Contention()
    for now in range(3):
        neighbours.put("a", now)
    assert not neighbours.others_active("a", 2)
    assert neighbours.others_active("b", 2)


def test_others_are_in_use_for_a_while_after_their_last_batch():
    neighbours = Contention()
    neighbours.put("a", 0.0)
    neighbours.put("b", 0.1)
    neighbours.put("b", 0.2)
    assert neighbours.others_active("b", IN_USE_S / 2)
    assert not neighbours.others_active("b", IN_USE_S + 0.1)
    assert neighbours.others_active("a", IN_USE_S + 0.1)
    assert neighbours.others_active("c", IN_USE_S + 0.1)
    assert not neighbours.others_active("a", IN_USE_S + 0.3)


def test_at_first_nobody_is_there():
    assert not Contention().others_active("a", 0.0)
