"""Has a version loaded and waits for it, for callers who ask for the load itself instead of an answer."""

from __future__ import annotations

import time
from collections.abc import Callable

from millstream.gateway.catalog.interfaces import ModelCatalog
from millstream.gateway.placement.demands import Demands
from millstream.gateway.placement.refusals import failure_of
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.wire.records import State


class LoadWait:
    """Loads versions on request in one gateway. Call it in the event loop."""

    def __init__(self, catalog: ModelCatalog, demands: Demands, clock: Callable[[], float] = time.monotonic) -> None:
        self._catalog = catalog
        self._demands = demands
        self._clock = clock

    async def load(self, manifest: Manifest, seconds_max: float) -> None:
        """Return when a worker has the version ready; others may be unloaded for it.

        Raises:
            Failure: MEMORY (no worker has memory for it), MODEL (it failed), NOT_FOUND (it was removed), UNAVAILABLE.
        """
        catalog, until = self._catalog, self._clock() + seconds_max
        while True:
            view = catalog.snapshot.model(manifest.model).version(manifest.version)
            if view.ready:
                return
            if view.state is State.FAILED:
                raise Failure(Code.MODEL, f"model '{manifest.model}' cannot be loaded: {view.reason}")
            refusal = self._demands.load(manifest.content_id, until)
            if refusal is not None:
                raise failure_of(manifest.model, refusal)
            left_s = until - self._clock()
            if left_s <= 0:
                message = f"model '{manifest.model}' was not loaded within {seconds_max:g} s"
                raise Failure(Code.UNAVAILABLE, message, retry_after_s=1)
            await catalog.next_change(left_s)
