"""A supervisor that saw a worker die says so at once, so that nobody waits for the lease to run out."""

from __future__ import annotations

import json
from typing import NamedTuple

from redis.exceptions import RedisError

from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.url import RedisAddress, async_client


class Death(NamedTuple):
    """A worker (`millstream.services.wire.worker_id`) that is gone, and what it was running.

    `batches`: their names; None: nobody knows. `blamed`: the content id of the version that it died of, "" for none.
    """

    worker: str
    batches: tuple[str, ...] | None = None
    blamed: str = ""

    def message(self) -> str:
        """As it is published."""
        if self.batches is None:
            return f"died:{self.worker}"
        return f"died:{self.worker} " + json.dumps({"batches": self.batches, "blamed": self.blamed})

    @classmethod
    def read(cls, text: str) -> Death:
        """From a message less its kind. Raises ValueError."""
        worker, _, rest = text.partition(" ")
        if not rest:
            return cls(worker)
        document = json.loads(rest)
        try:
            return cls(worker, tuple(map(str, document["batches"])), str(document["blamed"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no death: {text[:200]}") from error


async def publish_death(address: RedisAddress, keys: InstallationKeys, death: Death) -> bool:
    """Tell every gateway of a death; False if Redis could not be told.

    The lease time still covers a message that is lost.
    """
    try:
        async with async_client(address, retries=1) as redis:
            await redis.publish(keys.changes, death.message())
    except (RedisError, OSError):
        return False
    return True
