"""Chooses among many workers quickly: keeps the price that each asks for a load until the worker changes. Pure.

WorkerView ─> Fleet.update ─> a quote for each worker ─> Fleet.choose ─> the best workers, or a Refusal

A quote is the curve "bytes freed -> cost of the instances to unload". From the curves comes a table of prices: size
class of the need x worker. A choice is a search in one row of that table, so that 200 workers with 25 models each cost
less than 0.1 ms (`make plan-study` measures it).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from millstream.services.placement.room import Room, cost, freed_bytes, make_room
from millstream.services.placement.views import Footprint, PlacedInstance, Refusal, RefusalKind, WorkerView

SPREAD_WORTH = 0.2  # share of its load time that the unloads for a move may cost, here and in plans of a controller
CLASSES_PER_OCTAVE = 2  # of sizes: a price is that of the class's largest size
#: Workers whose prices differ by less than this share of the version's load time count as equal: the version's own
#: order decides. So several gateways that see the same cheapest worker do not send all versions there.
CLOSE_LOADS = 0.1
QUOTE_LIFE_S = 5.0  # after which a quote is renewed although its worker has not changed: instances get idle
RENEWALS_MAX = 8  # quotes renewed for their age at one choice
#: of which the refusal is reported if several workers refuse: the one that an operator or a retry can most likely mend
_BEST_REFUSAL = (
    RefusalKind.NOTHING_EVICTABLE,
    RefusalKind.TOO_LARGE,
    RefusalKind.NO_WORKER,
)
_NONE = math.inf  # the price of what a worker cannot load
_NO_BYTES = -1  # class of nothing
_SizeClass = tuple[int, int]  # of the bytes of the host, and of the device


@dataclass(slots=True)
class _Quote:
    """What a worker asks for a load, at one instant.

    Args:
        freed: for each space of the room, bytes that unloading the first 0, 1, 2, … of its instances frees.
        prices: seconds until the loads that it has begun are done, and cost of unloading the first 0, 1, 2, … of its
            instances, in expected seconds of loading; at last that of a load that does not fit.
    """

    made_at: float
    room: Room
    freed: list[npt.NDArray[np.float64]]
    prices: npt.NDArray[np.float64]

    def price(self, sizes_bytes: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
        """Return the price of each size, in seconds. `sizes_bytes`: of the host, and of the device."""
        numbers = [
            np.searchsorted(freed, sizes - space.free_bytes)
            for space, freed, sizes in zip(self.room.spaces, self.freed, sizes_bytes, strict=False)
        ]
        return self.prices[numbers[0] if len(numbers) == 1 else np.maximum(*numbers)]


class Fleet:
    """The workers that may load a version, kept up to date by differences. Not thread-safe.

    `quoted`: quotes that were made so far; this is what choosing costs.
    """

    def __init__(self) -> None:
        self.quoted = 0
        self._workers: list[WorkerView | None] = []  # by slot; None: the slot is free
        self._quotes: list[_Quote | None] = []  # by slot; None: to be made
        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._keys = np.zeros(0, np.uint64)  # of the workers, by slot; a restart keeps it
        self._own_keys = np.zeros(0, np.uint64)  # of the processes: decide between an old one and its replacement
        self._prices: dict[_SizeClass, npt.NDArray[np.float64]] = {}  # prices by slot
        self._sizes = _sizes_of(())  # of these classes
        self._changed: set[int] = set()  # slots whose quote is to be made
        self._costs: dict[str, dict[str, tuple[PlacedInstance, float, float]]] = {}  # worker -> content id -> cost
        self._next_renewal = 0  # slot

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, worker: str) -> WorkerView:
        view = self._workers[self._slots[worker]]
        assert view is not None
        return view

    def __contains__(self, worker: str) -> bool:
        return worker in self._slots

    def ids(self) -> list[str]:
        """Return the ids of the workers, in order."""
        return sorted(self._slots)

    def update(self, worker: WorkerView) -> None:
        """Add a worker, or replace what is known of it."""
        slot = self._slots.get(worker.id)
        if slot is None:
            slot = self._new_slot(worker.id)
        self._workers[slot] = worker
        self._changed.add(slot)

    def remove(self, worker: str) -> None:
        """Forget a worker. One that is not known is no error."""
        slot = self._slots.pop(worker, None)
        if slot is None:
            return
        self._workers[slot] = self._quotes[slot] = None
        self._changed.discard(slot)
        self._costs.pop(worker, None)
        self._free_slots.append(slot)
        for prices in self._prices.values():
            prices[slot] = _NONE

    def has_room(self, need: Footprint) -> bool:
        """Return whether a version fits into a worker now, with nothing unloaded."""
        return any(view is not None and not view.draining and view.has_room(need) for view in self._workers)

    def order(self, worker: str, content_id: str, need: Footprint, now: float) -> tuple[str, ...]:
        """Count a load that was ordered and that the worker has not published yet, until the next `update`.

        Returns the instances that the worker is expected to unload for it. They leave the view, so that no other order
        counts on their memory.
        """
        view = self[worker]
        if content_id in view.instances:
            return ()
        victims = make_room(view, need, now)
        gone = () if isinstance(victims, Refusal) else victims
        stay = {one: instance for one, instance in view.instances.items() if one not in gone}
        host, device = freed_bytes(view, gone)
        stay[content_id] = PlacedInstance(content_id, need, loaded_at=math.inf, last_used=now, in_use=True)
        self.update(
            replace(
                view,
                used_bytes=view.used_bytes - host + need.load_bytes,
                device_used_bytes=view.device_used_bytes - device + need.device_load_bytes,
                instances=stay,
            )
        )
        return gone

    def choose(
        self, content_id: str, need: Footprint, now: float, limit: int = 3, exclude: Collection[str] = ()
    ) -> list[str] | Refusal:
        """Return the ids of at most `limit` workers that can load a version, the best first. For the rest, `offers`."""
        offers = self.offers(content_id, need, now, limit, exclude)
        return offers if isinstance(offers, Refusal) else [worker for worker, _ in offers]

    def offers(
        self, content_id: str, need: Footprint, now: float, limit: int = 3, exclude: Collection[str] = ()
    ) -> list[tuple[str, float]] | Refusal:
        """Return the ids of at most `limit` workers that can load a version, with their price in seconds, best first.

        Args:
            content_id: the version, whose own order decides between workers with about the same price.
            need: what it takes.
            now: the current instant.
            limit: number of workers to return at most.
            exclude: workers that are not asked.
        """
        if not self._slots:
            return Refusal(RefusalKind.NO_WORKER, "no worker of its pools is running", 1.0)
        self._renew(now)
        asked = self._without(exclude)
        prices = self._row(_size_class(need)) + asked
        if prices.min() == _NONE:
            prices = self._exact_prices(need) + asked  # the class's largest size may be too large, the need not
        best = float(prices.min())
        if best == _NONE:
            return self._refusal(need)
        close = np.flatnonzero(prices <= best + CLOSE_LOADS * need.load_s)
        ranks = _mixed(self._keys[close], key_of(content_id))
        ranked = close[np.lexsort((self._own_keys[close], ranks))][:limit].tolist()
        if len(ranked) < limit:
            by_price = np.lexsort((self._own_keys, prices))[: 2 * limit].tolist()
            ranked += [slot for slot in by_price if slot not in ranked and prices[slot] < _NONE][: limit - len(ranked)]
        chosen = [(self._workers[slot], float(prices[slot])) for slot in ranked]
        return [(view.id, price) for view, price in chosen if view is not None]

    def ranked(self, content_id: str, limit: int, exclude: Collection[str] = ()) -> list[str]:
        """Return at most `limit` workers that are not about to stop in the version's own order, whatever they hold."""
        views = self._workers
        asked = np.array([view is not None and not view.draining and view.id not in exclude for view in views], bool)
        slots = np.flatnonzero(asked)
        ranks = _mixed(self._keys[slots], key_of(content_id))
        best = slots[np.lexsort((self._own_keys[slots], ranks))][:limit].tolist()
        return [view.id for slot in best if (view := views[slot]) is not None]

    def _new_slot(self, worker: str) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = len(self._workers)
            self._workers.append(None)
            self._quotes.append(None)
            self._keys = np.append(self._keys, np.uint64(0))
            self._own_keys = np.append(self._own_keys, np.uint64(0))
            self._prices = {kind: np.append(prices, _NONE) for kind, prices in self._prices.items()}
        self._slots[worker] = slot
        self._keys[slot], self._own_keys[slot] = worker_key(worker), key_of(worker)
        return slot

    def _renew(self, now: float) -> None:
        """Make the quotes of the workers that changed, and of some whose quotes are old."""
        for _ in range(min(RENEWALS_MAX, len(self._workers))):
            slot = self._next_renewal % len(self._workers)
            quote = self._quotes[slot]
            if quote is not None and now - quote.made_at < QUOTE_LIFE_S:
                break
            self._next_renewal = slot + 1
            if quote is not None:
                self._changed.add(slot)
        for slot in self._changed:
            self._quote(slot, now)
        self._changed.clear()

    def _quote(self, slot: int, now: float) -> None:
        view = self._workers[slot]
        assert view is not None
        self.quoted += 1
        room = Room.of(view)
        known = self._costs.get(view.id, {})
        costs: dict[str, tuple[PlacedInstance, float, float]] = {}
        for one in room.evictable:
            priced = known.get(one.content_id)
            if priced is None or priced[0] is not one or now - priced[1] >= QUOTE_LIFE_S:
                priced = (one, now, cost(one, now))
            costs[one.content_id] = priced
        self._costs[view.id] = costs
        seconds = [costs[one.content_id][2] for one in room.evictable]
        order = room.cheapest_first(seconds)
        quote = _Quote(
            now,
            room,
            [np.array(space.freed_in_order(order), np.float64) for space in room.spaces],
            np.array([*accumulate((seconds[at] for at in order), initial=view.loading_s), _NONE]),
        )
        self._quotes[slot] = quote
        offers = quote.price(self._sizes) if not view.draining else np.full(len(self._prices), _NONE)
        for prices, price in zip(self._prices.values(), offers.tolist(), strict=True):
            prices[slot] = price

    def _row(self, kind: _SizeClass) -> npt.NDArray[np.float64]:
        """Return the prices of a size class by slot."""
        row = self._prices.get(kind)
        if row is None:
            row = self._prices[kind] = self._prices_of(_sizes_of([kind]))
            self._sizes = _sizes_of(self._prices)
        return row

    def _prices_of(self, sizes: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
        quoted = zip(self._workers, self._quotes, strict=True)
        return np.array(
            [quote.price(sizes)[0] if view and quote and not view.draining else _NONE for view, quote in quoted]
        )

    def _without(self, exclude: Collection[str]) -> npt.NDArray[np.float64] | float:
        """Return what is added to the prices of the workers: nothing, or infinity for those that are not asked."""
        if not exclude:
            return 0.0
        added = np.zeros(len(self._workers))
        added[[self._slots[worker] for worker in exclude if worker in self._slots]] = _NONE
        return added

    def _exact_prices(self, need: Footprint) -> npt.NDArray[np.float64]:
        """Return the prices of exactly this need."""
        sizes = (need.load_bytes, need.device_load_bytes)
        return self._prices_of([np.array([size], np.float64) for size in sizes])

    def _refusal(self, need: Footprint) -> Refusal:
        quoted = zip(self._workers, self._quotes, strict=True)
        refusals = [quote.room.refusal(need) for view, quote in quoted if view and quote and not view.draining]
        if not refusals:
            return Refusal(RefusalKind.NO_WORKER, "all workers of its pools are about to stop", 1.0)
        return min(
            refusals, key=lambda refusal: (_BEST_REFUSAL.index(refusal.kind), refusal.retry_after_s, refusal.reason)
        )


def key_of(text: str) -> int:
    """Return a number of 64 bits for a text; equal in all processes."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def worker_key(worker: str) -> int:
    """Return a worker's number for rendezvous hashing: without the start of the process, so that a restart keeps it."""
    return key_of(worker.rpartition("-")[0] or worker)


def _mixed(keys: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """Return the ranks of workers for a version (rendezvous hashing), mixed by the finaliser of splitmix64."""
    mixed = keys ^ np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def rendezvous(content_id: str, worker: str) -> int:
    """Return the rank of a worker for a version; the least comes first. Equal in all processes."""
    return int(_mixed(np.array([worker_key(worker)], np.uint64), key_of(content_id))[0])


def _size_class(need: Footprint) -> _SizeClass:
    return _class_of(need.load_bytes), _class_of(need.device_load_bytes)


def _class_of(size_bytes: int) -> int:
    return math.ceil(CLASSES_PER_OCTAVE * math.log2(size_bytes)) if size_bytes else _NO_BYTES


def _sizes_of(kinds: Iterable[_SizeClass]) -> list[npt.NDArray[np.float64]]:
    """Return the bytes of size classes, of the host and of the device: the largest of each class."""
    classes = np.array([*kinds], np.float64).reshape(-1, 2)
    return list(np.where(classes == _NO_BYTES, 0.0, np.exp2(classes / CLASSES_PER_OCTAVE)).T)


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
