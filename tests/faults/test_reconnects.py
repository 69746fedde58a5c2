"""Redis restarts under many gateways: all come back, and not at the same instants."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from random import Random

from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.producer_link import BACKOFF_S_MAX, BACKOFF_S_MIN, ProducerLink
from millstream.services.queue.server import choose_binary
from tests.kit.redis_server import redis_server

LINKS = 60
ATTEMPTS = 4  # of each link, before Redis is back
WAIT_S = 120
TENTH_SHARE_MAX = 0.3


class Link:
    """A producer link that records what it draws, and when it was connected again."""

    def __init__(self, number: int) -> None:
        self.drawn: list[float] = []
        self.tried = asyncio.Event()
        self.restored = asyncio.Event()
        self.restored_at = 0.0
        self._random = Random(number)

    def draw(self) -> float:
        self.drawn.append(self._random.random())
        if len(self.drawn) == ATTEMPTS:
            self.tried.set()
        return self.drawn[-1]

    def on_restored(self, lost: bool) -> None:
        if self.drawn and not self.restored.is_set():
            assert lost
            self.restored_at = time.monotonic()
            self.restored.set()


async def restart(folder: Path) -> list[Link]:
    """Connect LINKS links, restart Redis, return the links after all are connected again."""
    keys = InstallationKeys("test").pool("cpu")
    links = [Link(number) for number in range(LINKS)]
    producers: list[ProducerLink] = []
    with ExitStack() as first:
        address = await asyncio.to_thread(first.enter_context, redis_server(choose_binary(), folder))
        for number, link in enumerate(links):
            producer = ProducerLink(
                address, keys, f"g{number}", lambda _: None, link.on_restored, lambda *_: None, link.draw
            )
            await producer.start()
            producers.append(producer)
        await asyncio.to_thread(first.close)
    await asyncio.gather(*(link.tried.wait() for link in links))
    with ExitStack() as second:
        began = time.monotonic()
        await asyncio.to_thread(second.enter_context, redis_server(choose_binary(), folder))
        await asyncio.gather(*(link.restored.wait() for link in links))
        per_100_ms = Counter(int((link.restored_at - began) * 10) for link in links)
        print("reconnects in each 100 ms:", sorted(per_100_ms.items()))
        assert all(producer.reconnects >= 1 for producer in producers)
        await asyncio.gather(*(producer.stop() for producer in producers))
        await asyncio.to_thread(second.close)
    return links


def test_gateways_come_back_at_different_instants(tmp_path: Path) -> None:
    links = asyncio.run(asyncio.wait_for(restart(tmp_path), WAIT_S))
    for attempt in range(ATTEMPTS):
        tenths = Counter(int(link.drawn[attempt] * 10) for link in links)
        assert max(tenths.values()) <= LINKS * TENTH_SHARE_MAX, tenths
    assert BACKOFF_S_MIN * 2 ** (ATTEMPTS - 1) < BACKOFF_S_MAX
