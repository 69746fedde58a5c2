"""A worker's side of an instance in a process that answers requests in parts (the process's side: streamed.py).

open ─> {"stream": n} ─> the process ─> a thread reads ─> part ─> sink.part … end ─> sink.end
A process that ends, or does not end a stream that was cancelled, ends all streams: the instance is `lost`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from millstream.plugins.children.arrays import to_tensor
from millstream.plugins.children.confined import INVALID, TERMINATED
from millstream.plugins.children.message_channel import BrokenMessageError, ClosedError, Message, TensorData
from millstream.plugins.children.process import InstanceProcess
from millstream.plugins.children.worker import ChildInstance, output_of
from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature
from millstream.workers.backends.base import Array, InstanceEnded, Stop, StreamSink

log = logging.getLogger("millstream.instance")

#: for a stream to end after it was cancelled; then its process is killed
CANCEL_S = 5.0
#: for the first part of a warm-up or a readiness probe
FIRST_PART_S = 60.0


class StreamingChild(ChildInstance):
    """An instance in a process whose answers come in parts. Arguments as of ChildInstance."""

    def __init__(
        self, start: Callable[[], InstanceProcess], title: str, signature: Signature, stop: Stop | None
    ) -> None:
        super().__init__(start, title, signature, stop)
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._number = 0
        self._running: dict[int, _Running] = {}
        self._child.begin_streams()
        threading.Thread(target=self._read, name=f"answers of {self._child.name}", daemon=True).start()

    def open(self, inputs: Mapping[str, Array], window_bytes: int, sink: StreamSink) -> _Running:
        """As in StreamingInstance."""
        self._checked.check(inputs)
        tensors = [to_tensor(name, self._specs[name], array) for name, array in inputs.items()]
        with self._lock:
            if self._child.ended:
                raise InstanceEnded(f"{self._title}: {self._child.ended}")
            self._number += 1
            running = self._running[self._number] = _Running(self, self._number, sink)
        if not self.say({"stream": running.number, "window": window_bytes}, tensors):
            self._take(running.number)
            raise InstanceEnded(f"{self._title}: {self._why()}")
        return running

    def say(self, header: dict[str, int], tensors: Sequence[TensorData] = ()) -> bool:
        """Send the process a message; return whether that was possible. One that does not read is ended."""
        with self._sending:
            try:
                self._child.send(header, tensors)
            except (ClosedError, OSError):
                self._child.kill("it reads no messages")
                return False
        return True

    def stuck(self, number: int) -> None:
        """End the process unless a stream that was cancelled has ended."""
        if number in self._running:
            self._child.kill("an answer that was cancelled did not end")

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Return the first part of the answer. Raises Failure."""
        first = _First()
        running = self.open(inputs, 1, first)
        if not first.came.wait(FIRST_PART_S):
            running.cancel()
            raise Failure(Code.MODEL, f"{self._title}: no part came within {FIRST_PART_S:g} s")
        running.cancel()
        first.ended.wait(CANCEL_S)
        if first.outputs is None:
            raise first.failure or Failure(Code.MODEL, f"{self._title}: its answer has no part")
        return first.outputs

    def terminate(self) -> None:
        """End the runs of warm-ups and probes: the streams of callers end by their deadlines."""
        with self._lock:
            ended = [one for one in self._running.values() if isinstance(one.sink, _First)]
        for running in ended:
            running.cancel()

    def _take(self, number: int) -> _Running | None:
        with self._lock:
            return self._running.pop(number, None)

    def _why(self) -> str:
        return self._child.ended or "its process has ended"

    def _read(self) -> None:
        """Hand on what the process says, until it ends; then end all streams."""
        try:
            while True:
                self._hand_on(self._child.receive())
        except (BrokenMessageError, KeyError, TypeError, ValueError) as error:
            self._child.kill(f"it broke its connection: {error}")
        except ClosedError:
            pass
        except Exception as error:
            log.exception("an answer could not be handed on")
            self._child.kill(f"its answer could not be handed on: {error}")
        why = self._child.await_end()
        with self._lock:
            left, self._running = list(self._running.values()), {}
        for running in left:
            running.sink.end(InstanceEnded(f"{self._title}: {why}"))

    def _hand_on(self, message: Message) -> None:
        header = message.header
        if "part" in header:
            running = self._running.get(int(header["part"]))
            if running is not None:
                answered = {tensor.name: tensor for tensor in message.tensors}
                running.sink.part([output_of(answered, spec, copy=False) for spec in self._outputs])
            return
        running = self._take(int(header["end"]))
        if running is None:
            return
        running.timer.cancel()
        failure = None
        if "error" in header:
            kind, text = header["error"]
            code = Code.INVALID if kind == INVALID else Code.CANCELLED if kind == TERMINATED else Code.MODEL
            failure = Failure(code, f"{self._title}: {text}")
        running.sink.end(failure)


class _Running:
    """A request that runs: an OpenStream."""

    def __init__(self, instance: StreamingChild, number: int, sink: StreamSink) -> None:
        self._instance = instance
        self.number = number
        self.sink = sink
        self._cancelled = False
        self.timer = threading.Timer(CANCEL_S, instance.stuck, [number])
        self.timer.daemon = True

    def taken(self, ordinal: int) -> None:
        self._instance.say({"taken": self.number, "ordinal": ordinal})

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self.timer.start()
            self._instance.say({"cancel": self.number})


class _First:
    """Keeps the first part of an answer."""

    def __init__(self) -> None:
        self.came, self.ended = threading.Event(), threading.Event()
        self.outputs: list[Array] | None = None
        self.failure: Failure | None = None

    def part(self, outputs: Sequence[Array]) -> None:
        if self.outputs is None:
            self.outputs = [np.array(one) for one in outputs]
        self.came.set()

    def end(self, failure: Failure | None = None) -> None:
        self.failure = failure
        self.came.set()
        self.ended.set()
