"""canary: readiness that is a fact. Every so often a small inference goes through the real queue to a worker and back.

Ready means: a reply of any kind came within FRESH_S; traffic itself is the best canary, so an idle system sends its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence

from gateway.lane import Lane
from gateway.outputs import Outputs, Reply
from gateway.request import InputTensor, Request
from services.datatypes import BYTES, ITEM_BYTES
from services.errors import Failure
from services.tensor import Signature

log = logging.getLogger("millrace.canary")

EVERY_S = 0.5
FRESH_S = 3.0
TIMEOUT_S = 2.0


class Canary:
    """`lanes`: of the serving versions. `connected`: whether Redis takes batches. `workers`: how many live."""

    def __init__(
        self, lanes: Callable[[], list[Lane]], connected: Callable[[], bool], workers: Callable[[], int]
    ) -> None:
        self._lanes = lanes
        self._connected = connected
        self._workers = workers
        self._task: asyncio.Task[None] | None = None
        self._turn = 0
        self.draining = False

    def ready(self) -> bool:
        """Whether requests are being answered now. A server with workers and no model yet is ready for its first."""
        if self.draining or not self._connected() or not self._workers():
            return False
        lanes = [lane for lane in self._lanes() if lane.failed is None]
        return not lanes or max(lane.replied for lane in lanes) > time.monotonic() - FRESH_S

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                self._send()
            except Failure:
                pass  # refused for overload: then replies are coming
            except Exception:
                log.exception("a canary could not be sent")
            await asyncio.sleep(EVERY_S)

    def _send(self) -> None:
        lanes = [lane for lane in self._lanes() if lane.ready]
        if not lanes:
            return
        now = time.monotonic()
        if max(lane.replied for lane in lanes) > now - EVERY_S:
            return
        self._turn += 1
        lane = lanes[self._turn % len(lanes)]
        inputs = zero_inputs(lane.manifest.signature)
        request = Request(inputs, 1, 0, now, now + TIMEOUT_S, _IGNORED)
        request.counted = False
        lane.add(request, 0)


class _Ignored:
    """Nobody waits for a canary's answer. Even an error of the model is one: a worker took the batch and replied."""

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None: ...

    def answer_one(self, request: Request, reply: Reply) -> None: ...

    def fail(self, request: Request, failure: Failure) -> None: ...


_IGNORED = _Ignored()


def zero_inputs(signature: Signature) -> list[InputTensor]:
    """One row of zeros (empty strings) for each input; variable dimensions are 1."""
    inputs: list[InputTensor] = []
    for spec in signature.inputs:
        shape = tuple(1 if dim < 0 else dim for dim in spec.shape)
        size = math.prod(shape) * (4 if spec.datatype == BYTES else ITEM_BYTES[spec.datatype])
        inputs.append(InputTensor(shape, bytes(size), size))
    return inputs
