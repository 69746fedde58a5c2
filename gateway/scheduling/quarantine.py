"""Refuses, for REST_S, requests that killed workers or whose runs had to be ended, from any client.

Requests are recognised by a digest of the version and the inputs.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from millstream.gateway.scheduling.request import Request
from millstream.services.errors import Code, Failure
from millstream.services.metrics.registry import Counter, Gauge

log = logging.getLogger("millstream.lane")

DIGESTS_MAX = 1024  # beyond that the oldest is forgotten
DIGEST_BYTES = 16
REST_S = 600.0
DIED, ENDED = "died", "ended"
_WHY = {
    DIED: "workers died every time they ran this request: it is refused for some minutes",
    ENDED: "the run of this request took too long and had to be ended: it is refused for some minutes",
}


class Quarantine:
    """The quarantine of one gateway. While it is empty, which is nearly always, no request is digested.

    `empty`: whether no request is refused.

    `publish` sends the text of a new entry to the other gateways, which `learn` it.
    """

    def __init__(
        self,
        gauge: Gauge,
        refused: Counter,
        publish: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publish = publish
        self.empty = True
        self._entries: OrderedDict[bytes, tuple[float, str]] = OrderedDict()  # until when, and what callers are told
        self._gauge = gauge
        self._refused = refused
        self._clock = clock

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, content_id: str, request: Request, why: str) -> None:
        """Refuse equal requests from now on. `why`: DIED (workers died) or ENDED (the run was ended)."""
        digest = _digest(content_id, request)
        log.warning("request %s is quarantined for %g s: %s", request.request_id.decode() or "?", REST_S, _WHY[why])
        self._add(digest, why)
        self._publish(f"{digest.hex()} {why}")

    def learn(self, text: str) -> None:
        """Add an entry that another gateway published. Raises ValueError if `text` has no digest."""
        digest, _, why = text.partition(" ")
        entry = bytes.fromhex(digest)
        if len(entry) != DIGEST_BYTES:
            raise ValueError(f"no digest: {digest[:64]}")
        if entry not in self._entries:
            self._add(entry, why)

    def _add(self, digest: bytes, why: str) -> None:
        self._entries[digest] = self._clock() + REST_S, _WHY.get(why, _WHY[DIED])
        self._entries.move_to_end(digest)
        while len(self._entries) > DIGESTS_MAX:
            self._entries.popitem(last=False)
        self._count()

    def _count(self) -> None:
        self.empty = not self._entries
        self._gauge.set(len(self._entries))

    def check(self, content_id: str, request: Request) -> None:
        """Raise Failure(MODEL) for a request that is in quarantine."""
        now = self._clock()
        while self._entries and next(iter(self._entries.values()))[0] <= now:
            self._entries.popitem(last=False)
            self._count()
        entry = self._entries.get(_digest(content_id, request)) if self._entries else None
        if entry is not None:
            self._refused.add()
            raise Failure(Code.MODEL, entry[1])


def _digest(content_id: str, request: Request) -> bytes:
    digest = hashlib.blake2b(content_id.encode(), digest_size=DIGEST_BYTES)
    for tensor in request.inputs:
        digest.update(repr(tensor.shape).encode())
        data: Any = tensor.data
        digest.update(data)
    return digest.digest()
