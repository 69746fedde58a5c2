"""Requests that are answered in parts: they run beside the main loop, which leases on.

lease ─> open ─> link to its gateway ─> instance.open ─> part, part, … ─> end: the reply, acknowledged
what the gateway says: taken ─> the instance goes on          cancel, or its connection ends ─> the instance is told
The lease is held, and extended by each heartbeat, until the stream has ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import BYTES, NUMPY, encode_elements
from millstream.services.model.signature import Signature
from millstream.services.queue.keys import PoolKeys
from millstream.services.queue.pipeline import RedisClock
from millstream.services.queue.stream_link import StreamLink, open_link
from millstream.services.segments.segment import Segments
from millstream.services.wire.batch import AGAIN, ReplyHeader, ReplyOutput, encode_given_up, encode_reply
from millstream.services.wire.part_messages import Cancel, PartHeader, Taken, encode_part
from millstream.workers.backends.base import Array, InstanceEnded, OpenStream, StreamingInstance, check_outputs
from millstream.workers.batches.consumer import Consumer, Finished
from millstream.workers.batches.lease import Lease, input_arrays
from millstream.workers.models.loaded_models import LoadedModel

log = logging.getLogger("millstream.streams")

T = TypeVar("T")

SETTLE_S = 0.05  # between two looks whether the last stream has ended
_NO_INPUTS = memoryview(b"")


class SentParts:
    """One request that is answered in parts: the sink of its instance. Its methods may be called in any thread."""

    def __init__(
        self, streams: OpenStreams, lease: Lease, signature: Signature, link: StreamLink, queue_s: float
    ) -> None:
        self._streams = streams
        self.lease = lease
        self._signature = signature
        self.link = link
        self._queue_s = queue_s
        self._began = time.monotonic()
        self._ordinal = 0
        self._ended = False
        self._lock = threading.Lock()
        self._open: OpenStream | None = None
        self._cancelled = False

    def begin(self, instance: StreamingInstance, inputs: Mapping[str, Array]) -> None:
        """Tell the gateway that the stream is open, and have the instance run it. Raises Failure, OSError."""
        self.link.send(self._part(()))
        opened = instance.open(inputs, self.lease.header.window, self)
        with self._lock:
            self._open = opened
            cancelled = self._cancelled
        if cancelled:
            opened.cancel()

    def part(self, outputs: Sequence[Array]) -> None:
        """Send one answer; waits while the gateway does not read. What comes after the end is dropped."""
        with self._lock:
            if self._ended:
                return
            self._ordinal += 1
        try:
            check_outputs(outputs, self._signature, 1)
            self.link.send(self._part(outputs))
        except Failure as failure:
            self.cancel()
            self.end(failure)
        except OSError:  # the connection has ended: its thread cancels the streams
            self.cancel()

    def end(self, failure: Failure | None = None) -> None:
        """End the stream, unless that is done."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        lease = self.lease
        if isinstance(failure, InstanceEnded) and not self._ordinal and not lease.isolated:
            self._streams.ended(self, encode_given_up(lease.header.name))  # it runs again, alone
            return
        reply, sent = self._reply(failure), True
        try:
            self.link.send(reply)
        except OSError:
            sent = False
        self._streams.ended(self, b"" if sent else reply)

    def taken(self, ordinal: int) -> None:
        """Note which parts the caller has."""
        if self._open is not None:
            self._open.taken(ordinal)

    def cancel(self) -> None:
        """Tell the instance that no more parts are wanted; it ends the stream."""
        with self._lock:
            self._cancelled, opened = True, self._open
        if opened is not None:
            opened.cancel()

    def _part(self, outputs: Sequence[Array]) -> bytes:
        headers, tensors = [], []
        for spec, array in zip(self._signature.outputs, outputs, strict=False):
            header, data = _encoded(spec.datatype, array)
            headers.append(header)
            tensors.append(data)
        lease = self.lease
        part = PartHeader(lease.header.name, self._streams.worker, lease.attempt, self._ordinal, headers)
        return encode_part(part, tensors, lease.reply_format)

    def _reply(self, failure: Failure | None) -> bytes:
        lease = self.lease
        failures = {} if failure is None else {0: [failure.code.value, failure.message]}
        seconds = time.monotonic() - self._began
        header = ReplyHeader(
            lease.header.name, self._streams.worker, self._queue_s, 0.0, seconds, 0.0, 1, [1], failures, [], "",
            lease.attempt,
        )  # fmt: skip
        return encode_reply(header, [], lease.reply_format)


def _encoded(datatype: str, array: Array) -> tuple[ReplyOutput, bytes | memoryview]:
    """Return an output with its data, all of it inline."""
    if datatype == BYTES:
        data: bytes | memoryview = encode_elements(array.reshape(-1))
        return ReplyOutput(array.shape, len(data), [len(data)], None), data
    contiguous = np.ascontiguousarray(array, dtype=NUMPY[datatype])
    data = contiguous.reshape(-1).view(np.uint8).data if contiguous.nbytes else b""
    return ReplyOutput(array.shape, contiguous.nbytes, None, None), data


class OpenStreams:
    """The open streams of one worker. `open` is called by the main loop; one thread opens and acknowledges.

    Args:
        connect: opens a consumer.
        folder: has the socket files of the gateways on this host.
    """

    def __init__(
        self,
        connect: Callable[[], Consumer],
        keys: PoolKeys,
        folder: Path,
        worker: str,
        segments: Segments,
        clock: RedisClock,
    ) -> None:
        self._connect = connect
        self._keys = keys
        self._folder = folder
        self.worker = worker
        self._segments = segments
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}  # held, by name of the batch
        self._streams: dict[str, SentParts] = {}
        self._links: dict[str, StreamLink] = {}  # by gateway
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._consumer: Consumer | None = None
        self._closing = ""  # why no more are opened

    def __len__(self) -> int:
        return len(self._leases)

    def leases(self) -> list[Lease]:
        """Return the leases that are held."""
        with self._lock:
            return list(self._leases.values())

    def open(self, leases: Sequence[Lease], model: LoadedModel) -> list[Finished]:
        """Take over leases whose requests ask for parts; nothing is left for the main loop to send."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="streams", daemon=True)
            self._thread.start()
        for lease in leases:
            model.calls.add(time.monotonic())
            with self._lock:
                self._leases[lease.header.name] = lease
            self._work.put(partial(self._begin, lease, model))
        return []

    def _run(self) -> None:
        while True:
            try:
                self._work.get()()
            except Exception:
                log.exception("a stream failed")

    def _begin(self, lease: Lease, model: LoadedModel) -> None:
        now_ms = self._clock.now_ms()
        lease.drop_expired(now_ms)
        queue_s = max(0.0, (now_ms - lease.header.created_ms) / 1000)
        stream = None
        try:
            if not lease.live_requests:
                raise Failure(Code.EXPIRED, lease.failures[0][1])
            if self._closing:
                self._refuse(lease, AGAIN, self._closing)
                return
            inputs = input_arrays(lease, model.manifest.signature, self._segments)
            lease.inline = _NO_INPUTS
            instance: StreamingInstance | None = model.instance  # type: ignore[assignment]
            if instance is None or instance.lost:
                self._refuse(lease, AGAIN, "the version is no longer loaded in this worker")
                return
            stream = SentParts(self, lease, model.manifest.signature, self._link(lease), queue_s)
            with self._lock:
                self._streams[lease.header.name] = stream
            stream.begin(instance, inputs)
        except (Failure, OSError, ValueError, MemoryError) as error:
            failure = error if isinstance(error, Failure) else Failure(Code.UNAVAILABLE, str(error), retry_after_s=1)
            if stream is not None:
                stream.end(failure)
            else:
                self._refuse(lease, failure.code.value, failure.message)

    def _refuse(self, lease: Lease, code: str, message: str) -> None:
        """Answer a request that does not begin, through Redis. `code`: of a Failure, or AGAIN."""
        failures = {0: [code, message]}
        header = ReplyHeader(lease.header.name, self.worker, 0.0, 0.0, 0.0, 0.0, 0, [], failures, [], "", lease.attempt)
        self._acknowledge(lease, encode_reply(header, [], lease.reply_format))

    def _link(self, lease: Lease) -> StreamLink:
        """Return the connection to the gateway of a lease. Raises OSError, Failure."""
        gateway = self._keys.gateway_of(lease.header.replies)
        link = self._links.get(gateway)
        if link is None or link.ended:
            link = open_link(
                self._folder, self._keys, gateway, self._address, self._heard, partial(self._link_ended, gateway)
            )
            self._links[gateway] = link
        return link

    def _address(self, gateway: str) -> bytes | None:
        return self._with_consumer(lambda consumer: consumer.reply_address(gateway))

    def _heard(self, message: Taken | Cancel) -> None:
        stream = self._streams.get(message.name)
        if stream is None:
            return
        if isinstance(message, Taken):
            stream.taken(message.ordinal)
        else:
            stream.cancel()

    def _link_ended(self, gateway: str) -> None:
        """Cancel the streams of a connection that has ended: nobody reads them."""
        link = self._links.pop(gateway, None)
        with self._lock:
            lost = [one for one in self._streams.values() if one.link is link]
        for stream in lost:
            stream.cancel()

    def ended(self, stream: SentParts, reply: bytes) -> None:
        """Acknowledge the lease of a stream. `reply`: what Redis has yet to deliver; b"": nothing."""
        with self._lock:
            self._streams.pop(stream.lease.header.name, None)
        self._work.put(partial(self._acknowledge, stream.lease, reply))

    def _acknowledge(self, lease: Lease, reply: bytes) -> None:
        try:
            self._with_consumer(lambda consumer: consumer.reply_beside_main_loop([Finished(lease, reply, b"")]))
        except Failure as failure:  # its lease expires, and the gateway drops what another worker answers
            log.warning("a stream could not be acknowledged: %s", failure.message)
        with self._lock:
            self._leases.pop(lease.header.name, None)

    def _with_consumer(self, call: Callable[[Consumer], T]) -> T:
        """Return what a call returns, over a connection of this thread. Raises Failure."""
        for attempt in (1, 2):
            consumer = self._consumer = self._consumer or self._connect()
            try:
                return call(consumer)
            except Failure:
                consumer.close()
                self._consumer = None
                if attempt == 2:
                    raise
        raise AssertionError

    def settle(self) -> None:
        """Wait until all streams have ended; the drain of the worker limits it."""
        while self._leases:
            time.sleep(SETTLE_S)

    def end_all(self, why: str) -> None:
        """End all streams, and open no more: the worker leaves."""
        self._closing = why
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            with contextlib.suppress(Exception):
                stream.end(Failure(Code.UNAVAILABLE, why, retry_after_s=1))
