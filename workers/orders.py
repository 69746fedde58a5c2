"""A thread that carries out what gateways and the controller order this worker to load and unload.

orders:<worker> ─(BLPOP)─> Order ─> Residency.load, Residency.unload ─> the record of the worker; end of the demand
An order that was taken when the connection broke is carried out over the next connection.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from pydantic import ValidationError

from millstream.services.errors import Failure
from millstream.services.process.waits import Backoff
from millstream.services.wire.orders import Order, OrderReason
from millstream.workers.batches.consumer import Consumer
from millstream.workers.residency.residency import Residency
from millstream.workers.residency.unloads import EvictionReason

log = logging.getLogger("millstream.orders")

ORDER_WAIT_S = 0.5  # interval at which orders of the worker itself are noticed
#: Likewise while a load waits for its turn, and after an order to load, for SHORT_LOAD_S: memory is made free again as
#: soon as its load has ended.
LOAD_WAIT_S = 0.01
SHORT_LOAD_S = 0.25
BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 2.0


class OrderThread:
    """Takes orders until `stop`."""

    def __init__(self, connect: Callable[[], Consumer], residency: Residency) -> None:
        self._connect = connect
        self._residency = residency
        self._stopping = threading.Event()
        self._token = 0  # the highest fencing token so far
        self._current: Order | None = None  # taken, and not carried out yet
        self._loads_until = 0.0  # monotonic: a load may be in progress that soon ends
        self._thread = threading.Thread(target=self._run, name="orders", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Carry out no further order. Orders that wait end with the worker's other keys."""
        self._stopping.set()

    def _run(self) -> None:
        backoff = Backoff(BACKOFF_S_MIN, BACKOFF_S_MAX, alive_s_reset=BACKOFF_S_MAX)
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                with contextlib.closing(self._connect()) as consumer:
                    while not self._stopping.is_set():
                        self._step(consumer)
            except Failure as failure:
                log.debug("%s; trying again", failure.message)  # the heartbeat says so, too
            except Exception:
                log.exception("an order could not be carried out")
                self._current = None
            if not self._stopping.is_set():
                self._stopping.wait(backoff.after_death(time.monotonic() - began))

    def _step(self, consumer: Consumer) -> None:
        residency = self._residency
        if self._current is None and residency.again:
            self._current = residency.again.popleft()
        if self._current is not None:
            self._obey(self._current, consumer)
            self._current = None
        began = time.monotonic()
        residency.turns.advance(consumer)
        residency.quotas.settle_wants()
        looked_s = time.monotonic() - began
        while residency.ended:
            consumer.end_demand(residency.ended[0])
            residency.ended.popleft()
        residency.evictions.repay(consumer)
        residency.evictions.keep_quotas(consumer)
        residency.evictions.recall(consumer)
        residency.evictions.unload_idle(consumer)
        residency.evictions.unload_ahead(consumer)
        if not residency.again:
            soon = residency.turns.line or time.monotonic() < self._loads_until
            # Among a thousand models a look at the line takes milliseconds: it takes at most a quarter of the time.
            wait_s = max(LOAD_WAIT_S, 3 * looked_s) if soon else ORDER_WAIT_S
            data = consumer.take_order(min(wait_s, ORDER_WAIT_S))
            self._current = None if data is None else self._read(data)

    def _read(self, data: bytes) -> Order | None:
        """Return an order; None, with a log line, if it cannot be read or comes from a controller that was replaced."""
        try:
            order = Order.model_validate_json(data)
        except ValidationError as error:
            log.warning("an order cannot be read (another release?): %s", error)
            return None
        if order.token and order.token < self._token:
            log.info("an order to %s %s is ignored: its controller was replaced", order.do, order.content_id)
            return None
        self._token = max(self._token, order.token)
        return order

    def _obey(self, order: Order, consumer: Consumer) -> None:
        if order.do == "load":
            self._residency.load(order, consumer)
            self._loads_until = time.monotonic() + SHORT_LOAD_S
        elif not self._residency.evictions.unload(order.content_id, _reason_of(order), order.why, consumer):
            log.info("not unloaded: %s: it is in use, pinned, not loaded or needed", order.content_id)


def _reason_of(order: Order) -> EvictionReason:
    """Return why the controller orders an unload; an older one does not say."""
    return EvictionReason.IDLE if order.reason == OrderReason.IDLE else EvictionReason.MOVED
