"""Batches that a gateway on this host dispatches to this worker without a trip through Redis.

idle ─> attach to the gateway served last ─> wait ─> Lease ─> run ─> answer, over the same connection
Redis found to have batches waiting, a long run, a drain ─> detach(what is answered all the same)
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Collection

from millstream.services.process.waits import Spin
from millstream.services.queue.keys import PoolKeys
from millstream.services.queue.pipeline import RedisClock
from millstream.services.queue.reply_links import ReplyLinks
from millstream.services.queue.reply_protocol import MESSAGE_BYTES_MAX
from millstream.services.wire.batch import TERM_MAX, attach_message, detach_message, read_batch, return_message
from millstream.workers.batches.lease import Lease
from millstream.workers.models.loaded_models import LoadedModels

log = logging.getLogger("millstream.worker")

AGAIN_S = 0.1  # after a detach because batches waited in Redis, whose scripts share workers fairly, until an attach
SWITCH_S = 0.25  # without a batch of its gateway, after which the worker attaches to another one that it served
SEND_S_MAX = 0.25  # for a gateway to read what fills the socket; then the connection is given up
BLOCK_S_MAX = 1.0  # of one wait
READ_MAX = 3  # batches that are read at once; those that fit together are merged
NOT_SERVED_PAUSE_S = 0.1  # until the gateway knows that the version is unloaded
LARGE_PAUSE_S = 60.0  # for which batches of a version with large replies take the queue


class DirectWork:
    """The worker's end of direct dispatch. Used by the main loop; `detach` also by the watchdog's thread.

    Args:
        links: connections to gateways, used for nothing else.
        on: whether the worker attaches at all.
    """

    def __init__(
        self,
        links: ReplyLinks[Lease],
        keys: PoolKeys,
        worker: str,
        models: LoadedModels,
        clock: RedisClock,
        spin: Spin,
        *,
        on: bool = True,
    ) -> None:
        self._links = links
        self._keys = keys
        self._worker = worker
        self._models = models
        self._clock = clock
        self._spin = spin
        self._on = on
        self._lock = threading.Lock()
        self._link: socket.socket | None = None  # while attached
        self._gateway = ""  # to which it is attached, or was
        self._served = ""  # whose batch from the queue ran last
        self._term = 0
        self._not_before = 0.0  # monotonic
        self._last_batch = 0.0  # when its gateway last sent one (monotonic)

    @property
    def attached(self) -> bool:
        return self._link is not None

    def served(self, lease: Lease) -> None:
        """Note whose batch from the queue was run."""
        self._served = self._keys.gateway_of(lease.header.replies)

    def attach(self) -> bool:
        """Attach to the gateway that was served last, if that is possible now; return whether the worker is attached.

        Call it before the worker becomes idle in Redis.
        """
        now = time.monotonic()
        if self._link is not None:
            if self._served in {"", self._gateway} or now < self._last_batch + SWITCH_S:
                return True
            self.detach(())
        if not self._on or not self._served or now < self._not_before:
            return False
        link = self._links.direct(self._served)
        if link is None:
            return False
        self._term = self._term % TERM_MAX + 1
        try:
            link.send(attach_message(self._term, self._keys.pool, self._worker), socket.MSG_NOSIGNAL)
        except OSError as error:  # it does not read, or is gone
            self._links.drop(link, error)
            return False
        self._link, self._gateway, self._last_batch = link, self._served, now
        return True

    def detach(self, taken: Collection[Lease], *, pause_s: float = 0.0, writing: bool = False) -> None:
        """Take no more batches.

        Args:
            taken: leases that will be answered; the gateway puts all others that it has sent into the queue.
            pause_s: time until the worker may attach again.
            writing: whether a batch that is not among `taken` runs, and may still write into its shared memory.
        """
        with self._lock:
            link, self._link = self._link, None
            self._not_before = time.monotonic() + pause_s
            if link is not None:
                names = [lease.header.name for lease in taken if lease.link is link]
                self._send(link, detach_message(self._term, names, writing=writing))

    def wait(self, poller: select.poll, redis_fd: int) -> tuple[list[Lease], bool]:
        """Wait for batches or for Redis: return the batches that came, and whether Redis answered."""
        link = self._link
        assert link is not None
        began = time.perf_counter()
        data, redis = self._busy_poll(link, began), False
        if not data:
            for fd, _ in poller.poll(BLOCK_S_MAX * 1000):
                redis |= fd == redis_fd
            data = self._receive(link)
        leases = []
        while data:
            lease = self._lease(link, data)
            if lease is not None:
                leases.append(lease)
            data = self._receive(link) if len(leases) < READ_MAX else b""
        if leases:
            self._last_batch = time.monotonic()
            self._spin.record_wait(time.perf_counter() - began, sum([len(lease.header.rows) for lease in leases]))
        return leases, redis

    def poller(self, redis_fd: int) -> select.poll:
        """Return what `wait` blocks on."""
        poller = select.poll()
        poller.register(redis_fd, select.POLLIN)
        if self._link is not None:
            poller.register(self._link.fileno(), select.POLLIN)
        return poller

    def _busy_poll(self, link: socket.socket, began: float) -> bytes:
        """Return a message that comes while the worker busy-polls; b"": none came."""
        until = began + self._spin.seconds
        while time.perf_counter() < until:
            with contextlib.suppress(BlockingIOError):
                return self._receive_now(link)
            os.sched_yield()  # let runnable threads go first
        return b""

    def _receive(self, link: socket.socket) -> bytes:
        """Return a message that is there; b"": there is none."""
        try:
            return self._receive_now(link)
        except BlockingIOError:
            return b""

    def _receive_now(self, link: socket.socket) -> bytes:
        """Return a message, or b"" if the gateway is gone, to which the worker is no longer attached then.

        Raises BlockingIOError if there is no message.
        """
        try:
            data = link.recv(MESSAGE_BYTES_MAX + 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise
        except OSError:
            data = b""
        if not data:
            self._lose(link, ConnectionResetError("the gateway closed the connection"))
        return data

    def _lease(self, link: socket.socket, data: bytes) -> Lease | None:
        """Return the lease of a batch; None: the gateway has put it into the queue, or does so now."""
        try:
            term, lane, batch = read_batch(data)
            if term != self._term or self._link is not link:
                return None
            now = time.monotonic()
            lease = Lease(lane, b"", batch, 1, now)
        except (ValueError, TypeError) as error:
            log.warning("a gateway sent what is no batch: %s", error)
            self._lose(link, OSError("it sent what is no batch"))
            return None
        lease.leased_at = now - max(0.0, (self._clock.now_ms() - lease.header.created_ms) / 1000)
        model = self._models.get(lane)
        if model is None or model.instance is None or not model.gate.enter():
            self._send(link, return_message(lease.header.name, NOT_SERVED_PAUSE_S))
            return None
        lease.link, lease.gate = link, model.gate
        return lease

    def answer(self, lease: Lease, reply: bytes, blob: bytes) -> None:
        """Send the reply to a lease that came directly. A reply too large for the connection takes the queue."""
        assert lease.link is not None
        if lease.gate is not None:
            lease.gate.leave()
        if blob or len(reply) > MESSAGE_BYTES_MAX:
            reply = return_message(lease.header.name, LARGE_PAUSE_S)
        self._send(lease.link, reply)

    def _send(self, link: socket.socket, message: bytes) -> None:
        """Send a message, or give the connection up, whose batches the gateway then puts into the queue."""
        try:
            try:
                link.send(message, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                writable = select.poll()
                writable.register(link.fileno(), select.POLLOUT)
                writable.poll(SEND_S_MAX * 1000)
                link.send(message, socket.MSG_NOSIGNAL)
        except OSError as error:
            self._lose(link, error)

    def _lose(self, link: socket.socket, why: OSError) -> None:
        if self._link is link:
            self._link = None
        self._links.drop(link, why)

    def close(self) -> None:
        """Close all connections."""
        self._link = None
        self._links.close()
