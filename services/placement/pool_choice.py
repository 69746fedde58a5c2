"""Which of several pools loads a version that none has, and when the preferred pool gets what another answers. Pure.

Memory of a preferred pool is short where the pool is small and fast. Unloading there what is called, while another pool
has memory free, makes calls wait for loads that no pool needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from millstream.services.placement.fleet import Fleet
from millstream.services.placement.views import Footprint, Refusal

SPREAD_WORTH = 0.2  # share of its load time that the unloads for a move may cost, here and in plans of a controller


class PoolOffer(NamedTuple):
    """A pool that could load a version, and what the version takes in its workers."""

    pool: str
    fleet: Fleet
    need: Footprint


def without_unloading(offers: Iterable[PoolOffer]) -> str:
    """Return the first pool with a worker in which a version fits beside all that is there; "": there is none."""
    return next((one.pool for one in offers if one.fleet.has_room(one.need)), "")


def is_worth_moving(fleet: Fleet, content_id: str, need: Footprint, now: float) -> bool:
    """Return whether a preferred pool is to load a version that another pool answers: it costs what a move may cost."""
    offers = fleet.offers(content_id, need, now, 1)
    return not isinstance(offers, Refusal) and offers[0][1] <= SPREAD_WORTH * need.load_s
