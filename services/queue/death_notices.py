"""Death notices: a supervisor reports a dead worker at once, so that its batches need not wait for the lease."""

from __future__ import annotations

import json
from typing import NamedTuple

from redis.exceptions import RedisError

from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.url import RedisAddress, async_client


class Death(NamedTuple):
    """A worker that died, and what it was running."""

    worker: str  # as in millstream.services.wire.worker_id
    batches: tuple[str, ...] | None = None  # names of the batches that it was running; None: unknown
    blamed: str = ""  # content id of the version whose run or load ended the worker, or ""

    def message(self) -> str:
        """Return the message that is published."""
        if self.batches is None:
            return f"died:{self.worker}"
        return f"died:{self.worker} " + json.dumps({"batches": self.batches, "blamed": self.blamed})

    @classmethod
    def read(cls, text: str) -> Death:
        """Parse a message without its leading "died:". Raises ValueError."""
        worker, _, rest = text.partition(" ")
        if not rest:
            return cls(worker)
        document = json.loads(rest)
        try:
            return cls(worker, tuple(map(str, document["batches"])), str(document["blamed"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a death notice: {text[:200]}") from error


async def publish_death(address: RedisAddress, keys: InstallationKeys, death: Death) -> bool:
    """Publish a death to every gateway; returns False if Redis could not be reached.

    If the message is lost, the worker's leases still expire.
    """
    try:
        async with async_client(address, retries=1) as redis:
            await redis.publish(keys.changes, death.message())
    except (RedisError, OSError):
        return False
    return True
