"""upload_slots: limits the uploads of this gateway and publishes the state of each to all gateways."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from millstream.gateway.catalog.interfaces import ModelCatalog, UploadKey
from millstream.services.errors import Code, Failure
from millstream.services.process.audit import caller
from millstream.services.process.caller_slots import CallerSlots
from millstream.services.wire.records import State

AT_ONCE_MAX = 8  # uploads of one gateway; further uploads are refused
OF_CALLERS_MAX = 16  # the same with the first upload of each caller, so that slow ones of one do not refuse all others
RETRY_AFTER_S = 5.0


class UploadSlots:
    """Limits uploads in progress: each takes disk bandwidth and, during its check, a core and memory."""

    def __init__(self, catalog: ModelCatalog) -> None:
        self._catalog = catalog
        self._slots = CallerSlots(AT_ONCE_MAX, OF_CALLERS_MAX)
        self._running: Counter[UploadKey] = Counter()

    @asynccontextmanager
    async def acquire(self, model: str, version: int | None) -> AsyncIterator[Callable[[State], Awaitable[None]]]:
        """Take a slot for one upload. The upload is visible as RECEIVING; the yielded function publishes another state.

        Raises Failure(UNAVAILABLE) when too many uploads are in progress.
        """
        if not self._slots.may_take(caller()):
            raise Failure(
                Code.UNAVAILABLE,
                "as many uploads are in progress as are taken at once: try again",
                retry_after_s=RETRY_AFTER_S,
            )

        async def show(state: State) -> None:
            await self._catalog.set_upload(model, version, state)

        key = (model, version)
        async with self._slots.acquire(caller()):
            self._running[key] += 1
            try:
                await show(State.RECEIVING)
                yield show
            finally:
                self._running[key] -= 1
                if not self._running[key]:
                    del self._running[key]
                    await self._catalog.set_upload(model, version, None)
