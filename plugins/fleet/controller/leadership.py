"""Keeps this controller leader, or takes the lead when the leader is gone.

LeaderLock.acquire every RENEW_S ─> Lease ─> token of this controller, while it is sure to lead
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from millstream.services.errors import Failure
from millstream.services.process.cancellation import cancel_all
from millstream.services.process.logs import about
from millstream.services.process.waits import next_tick
from millstream.services.queue.leader_lock import LeaderLock

log = logging.getLogger("millstream.controller")

LEASE_S = 3.0  # for which a lead lasts: another controller takes over within LEASE_S + RENEW_S
RENEW_S = 1.0  # interval at which the leader renews the lead, and others try to take it
#: The leader gives no order in the last part of a lease: an order takes time, and clocks differ in speed.
MARGIN_S = 0.5


class Lease:
    """The lead as this controller knows it. Pure: instants are passed in, in monotonic seconds."""

    def __init__(self) -> None:
        self._token = 0
        self._until = 0.0
        self.leader = ""

    def renewed(self, token: int, leader: str, asked_at: float) -> None:
        """Record the answer to a question that was sent at `asked_at`. `token` 0: another controller leads."""
        self._token, self.leader = token, leader
        self._until = asked_at + LEASE_S - MARGIN_S

    def refused(self) -> None:
        """Record that a newer leader was met."""
        self._token = 0

    def token(self, now: float) -> int:
        """Return the fencing token; 0 while this controller is not sure to lead, as after a pause of its process."""
        return self._token if now < self._until else 0

    @property
    def last_token(self) -> int:
        """The token of the last lead, which may have ended; 0: there was none, or it was taken."""
        return self._token


class Leadership:
    """Renews the lead in a task.

    Args:
        lock: the lock in Redis.
        on_change: called when this controller begins or ceases to lead.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, lock: LeaderLock, on_change: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = lock
        self._on_change = on_change
        self._clock = clock
        self._lease = Lease()
        self._leads = 0  # token that was logged
        self._reachable = self._able = True
        self._task: asyncio.Task[None] | None = None

    @property
    def token(self) -> int:
        """The fencing token of this controller; 0 while it is not sure to lead."""
        return self._lease.token(self._clock())

    def refused(self) -> None:
        """Record that a newer leader gives orders: this controller slept, or Redis lost its data."""
        self._lease.refused()
        self._note()

    def pause(self) -> None:
        """Leave the lead to another controller until `resume`: this one cannot decide."""
        self._able = False

    def resume(self) -> None:
        self._able = True

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="leadership")

    async def stop(self) -> None:
        """Release the lead, so that another controller takes it at once."""
        if self._task is not None:
            await cancel_all([self._task])
        await self._release()

    async def _release(self) -> None:
        token = self._lease.last_token
        self._lease.refused()
        if token:
            with suppress(Failure):  # without Redis the lead expires
                if await self._lock.release(token):
                    log.info("released the lead with token %d", token, extra=about(token=token))

    async def _run(self) -> None:
        while True:
            if self._able:
                await self._renew()
            else:
                await self._release()
                self._note()
            await next_tick(RENEW_S)

    async def _renew(self) -> None:
        asked_at = self._clock()
        try:
            async with asyncio.timeout(LEASE_S):
                lead = await self._lock.acquire()
        except (Failure, TimeoutError) as error:
            if self._reachable:
                log.warning("the lead cannot be renewed: %s", error or "Redis does not answer")
            self._reachable = False
        else:
            self._reachable = True
            self._lease.renewed(lead.token, lead.leader, asked_at)
        self._note()

    def _note(self) -> None:
        """Log and report a change."""
        token = self.token
        if token == self._leads:
            return
        if token:
            log.info("leads with token %d", token, extra=about(token=token))
        elif self._lease.leader not in {"", self._lock.name}:
            log.warning("%s leads now", self._lease.leader, extra=about(leader=self._lease.leader))
        else:
            log.warning("does not lead any longer: the lead was not renewed in time")
        self._leads = token
        self._on_change()
