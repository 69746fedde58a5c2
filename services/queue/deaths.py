"""A supervisor that saw a worker die says so at once, so that nobody waits for the lease to run out."""

from __future__ import annotations

from redis.exceptions import RedisError

from services.queue.keys import InstanceKeys
from services.queue.url import RedisAddress, async_client


async def publish_death(address: RedisAddress, keys: InstanceKeys, worker: str) -> bool:
    """Tell every gateway that `worker` (`services.worker_id`) is gone; False if Redis could not be told.

    The lease time still covers a message that is lost.
    """
    try:
        async with async_client(address, retries=1) as redis:
            await redis.publish(keys.changes, f"died:{worker}")
    except (RedisError, OSError):
        return False
    return True
