"""How a worker leaves its pool, which of its batches go to other workers, and what it tells of earlier ones that died.

SIGTERM ─> drain thread ─> begin ─> its leases run ─> leave        the drain takes too long ─> leave_early
a long run ─> give_back_waiting                a run that cannot be terminated ─> end_stuck: the process ends

A thread waits for SIGTERM because Python runs signal handlers between two steps of the main thread. During a run the
handler would be called only after the run, however long it takes. Signals write to the wake-up descriptor at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from millstream.services.crashes import run_marks
from millstream.services.crashes.load_marks import PROBE, record_death, take_stale_marks
from millstream.services.errors import Failure
from millstream.services.process.exit_status import RUN_STUCK, end_at_once
from millstream.services.queue.death_notices import Death
from millstream.services.queue.scripts import ATTEMPTS_MAX
from millstream.services.repository.folder import FolderRepository
from millstream.workers.batches.consumer import Consumer, Finished
from millstream.workers.batches.lease import LeaseValidity
from millstream.workers.batches.watchdog import Guarded
from millstream.workers.heartbeat import Heartbeat
from millstream.workers.models.record_parts import BeatSignal
from millstream.workers.reconciler import Reconciler
from millstream.workers.worker import Worker

log = logging.getLogger("millstream.drain")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BEGIN = (0, *SIGNALS)  # the wake-up descriptor delivers any handled signal's number, or 0 from `begin`
GIVE_UP_SHARE = 0.9  # of the drain time; the remainder is for giving batches back
CUT_SHORT = 3  # exit code of a worker whose run was not over in time


class DrainThread:
    """Stops the main loop on SIGTERM or SIGINT, and limits how long the drain takes. A second signal ends the process.

    Args:
        supervised: whether a supervisor started this process, and kills it if the drain is to be cut short.
    """

    def __init__(self, drain_s: float, *, supervised: bool) -> None:
        self._drain_s = drain_s
        self._supervised = supervised
        self._wake_sender, self._wake_receiver = socket.socketpair()

    def start(self, stop: Callable[[], None], give_back: Callable[[], None]) -> None:
        """Install the signal handlers; must be called in the main thread.

        Args:
            stop: tells the main loop to run and answer what is leased, and to lease no more.
            give_back: gives the batches that still run near the end of the drain time to other workers; the process
                ends after it.
        """
        self._wake_sender.setblocking(False)
        signal.set_wakeup_fd(self._wake_sender.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._run, args=(stop, give_back), name="drain", daemon=True).start()

    def begin(self) -> None:
        """Drain as after SIGTERM."""
        with contextlib.suppress(BlockingIOError):  # the buffer is full of earlier calls
            self._wake_sender.send(b"\0")

    def _run(self, stop: Callable[[], None], give_back: Callable[[], None]) -> None:
        while self._wake_receiver.recv(1)[0] not in BEGIN:
            pass  # another signal that has a handler
        stop()
        # If the worker leaves in time, the process ends during this wait.
        self._wait_for_signals(self._drain_s * GIVE_UP_SHARE)
        log.warning("a run is not over after %.3g s: it is given to other workers", self._drain_s * GIVE_UP_SHARE)
        giving = threading.Thread(target=give_back, name="give back", daemon=True)
        giving.start()
        giving.join(self._drain_s * (1 - GIVE_UP_SHARE))
        os._exit(CUT_SHORT)

    def _wait_for_signals(self, seconds: float) -> None:
        """Return after some seconds, unless a further signal ends the process."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self._wake_receiver.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                number = self._wake_receiver.recv(1)[0]
                if number in SIGNALS and not self._supervised:
                    end_at_once(number)


log = logging.getLogger("millstream.worker")

HAND_OVER_S_MAX = 5.0  # for giving work back before the process ends


class Leave:
    """How one worker leaves. `loop` is the main loop."""

    def __init__(
        self,
        connect: Callable[[], Consumer],
        heartbeat: Heartbeat,
        signal: BeatSignal,
        leases: LeaseValidity,
        reconciler: Reconciler,
        loop: Worker,
    ) -> None:
        self._connect = connect
        self._heartbeat = heartbeat
        self._signal = signal
        self._leases = leases
        self._reconciler = reconciler
        self._loop = loop

    def begin(self) -> None:
        """Take no more work: gateways and the controller have other workers load from now on."""
        self._loop.state.draining = True
        self._signal.now()
        self._loop.stop()

    def leave(self) -> None:
        """Remove the worker from its pool and give its batches to other workers. Without Redis its leases expire."""
        with contextlib.suppress(Failure), contextlib.closing(self._connect()) as consumer:
            consumer.leave(ATTEMPTS_MAX)
            consumer.announce()

    def leave_early(self) -> None:
        """Give all batches back near the end of the drain time, while a run is still in progress."""
        self._reconciler.stop()
        self._loop.streams.end_all("the worker was stopped: try again")
        self._leases.forget()  # a run that ends now must not write where another batch may be
        self._loop.detach_all()
        self.leave()

    def give_back_waiting(self, guarded: Guarded) -> None:
        """Give the batches that wait behind a long run to other workers."""
        self._leases.forget()
        self._loop.detach_behind(guarded)
        with contextlib.suppress(Failure), contextlib.closing(self._connect()) as consumer:
            answered = [finished.lease for finished in self._loop.unsettled()]
            consumer.give_back([*guarded.group, *answered, *self._loop.streams.leases()])

    def end_stuck(self, guarded: Guarded) -> None:
        """End the process because a run cannot be terminated: answer its requests and give back all other batches."""
        log.error("a run of %s cannot be terminated: this process ends", guarded.group[0].lane)
        finished = self._loop.final_replies(guarded)
        self._loop.detach_behind(guarded)
        giving = threading.Thread(target=self._hand_over, args=(finished,), name="hand over", daemon=True)
        giving.start()
        giving.join(HAND_OVER_S_MAX)
        logging.shutdown()
        os._exit(RUN_STUCK)

    def _hand_over(self, finished: list[Finished]) -> None:
        """Send the finished replies and give back all other batches.

        The heartbeat is stopped first: a beat would add the worker to its pool again.
        """
        self._heartbeat.stop()
        with contextlib.suppress(Failure):
            consumer = self._connect()
            consumer.send_next(finished, 0, 0)
            consumer.receive_next()
            consumer.leave(ATTEMPTS_MAX, dying=True)
            consumer.announce()


log = logging.getLogger("millstream.worker")


def record_unseen_load_deaths(repository: FolderRepository, run_dir: Path, name: str) -> None:
    """Record deaths during loads, of earlier workers of this name and of trial loads, that no supervisor saw."""
    for worker in (name, f"{PROBE}-"):
        marks = take_stale_marks(run_dir, worker)
        try:
            record_death(repository, marks, "in a way that no supervisor saw", time.time(), certain=False)  # noqa: TID251 - for people
        except Failure as failure:
            log.warning("deaths of %s during loads cannot be recorded: %s", worker, failure.message)


def report_unseen_deaths(connect: Callable[[], Consumer], runs: Path, name: str) -> None:
    """Publish deaths of earlier workers of this name that no supervisor saw: their batches must run alone next."""
    for worker in run_marks.marked_workers(runs, name):
        run = run_marks.take_fatal_run(runs, worker)
        if run is None:
            continue
        death = Death(worker, run.batches if run.batches or not run.lane else None, run.lane)
        with contextlib.suppress(Failure), contextlib.closing(connect()) as consumer:
            consumer.publish(death.message())
