"""Requests that killed workers, by a digest of what they ask: they are refused for a while, whoever sends them again."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from gateway.request import Request
from services.errors import Code, Failure
from services.metrics.tally import Counter, Gauge

DIGESTS_MAX = 1024
DIGEST_BYTES = 16
REST_S = 600.0


class Quarantine:
    """One for a gateway. Nothing is digested while it is empty, which is nearly always.

    `tell(digest)`: makes a new one known to the other gateways, which `learn` it.
    """

    def __init__(self, held: Gauge, refused: Counter, clock: Callable[[], float] = time.monotonic) -> None:
        self.tell: Callable[[str], None] = lambda _: None
        self._until: OrderedDict[bytes, float] = OrderedDict()
        self._held = held
        self._refused = refused
        self._clock = clock

    def __len__(self) -> int:
        return len(self._until)

    def add(self, release: str, request: Request) -> None:
        """From now on refuse what is like `request`; the oldest of too many is forgotten."""
        digest = _digest(release, request)
        self._add(digest)
        self.tell(digest.hex())

    def learn(self, digest: str) -> None:
        """Another gateway refuses what has this digest. Raises ValueError if it is none."""
        known = bytes.fromhex(digest)
        if len(known) != DIGEST_BYTES:
            raise ValueError(f"no digest: {digest[:64]}")
        if known not in self._until:
            self._add(known)

    def _add(self, digest: bytes) -> None:
        self._until[digest] = self._clock() + REST_S
        self._until.move_to_end(digest)
        while len(self._until) > DIGESTS_MAX:
            self._until.popitem(last=False)
        self._held.set(len(self._until))

    def check(self, release: str, request: Request) -> None:
        """Raises Failure(MODEL) for a request that killed workers."""
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
            self._held.set(len(self._until))
        if self._until and _digest(release, request) in self._until:
            self._refused.add()
            raise Failure(Code.MODEL, "workers died every time they ran this request: it is refused for some minutes")


def _digest(release: str, request: Request) -> bytes:
    digest = hashlib.blake2b(release.encode(), digest_size=DIGEST_BYTES)
    for tensor in request.inputs:
        digest.update(repr(tensor.shape).encode())
        data: Any = tensor.data
        digest.update(data)
    return digest.digest()
