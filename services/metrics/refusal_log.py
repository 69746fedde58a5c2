"""refusal_log: one log line a minute for each reason for which requests were refused, with their number.

counters of refusals, which requests raise anyway ─> every minute: the difference ─> log
Nothing is done per request, and the number of reasons is fixed, so that a flood of refusals is a few lines.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

from millstream.services.metrics.catalogue import REQUESTS_REFUSED
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.process.logs import about

log = logging.getLogger("millstream.refusals")

INTERVAL_S = 60.0


class RefusalLog:
    """Logs how many requests this process refused, from its own counters.

    Args:
        registry: has the counters.
    """

    def __init__(self, registry: MetricsRegistry) -> None:
        self._registry = registry
        self._counted: Counter[str] = Counter()
        self._logged: Mapping[str, float] = self._counts()

    def count(self, reason: str) -> None:
        """Count a refusal that no counter of the registry has."""
        self._counted[reason] += 1

    async def run(self) -> None:
        """Log every INTERVAL_S until cancelled, and then what is left."""
        try:
            while True:
                await asyncio.sleep(INTERVAL_S)
                self.log()
        finally:
            self.log()

    def log(self) -> None:
        """Log the refusals since the last call."""
        counts = self._counts()
        for reason, count in counts.items():
            if (refused := round(count - self._logged.get(reason, 0.0))) > 0:
                values = about(reason=reason, count=refused)
                log.warning("%d requests were refused within a minute: %s", refused, reason, extra=values)
        self._logged = counts

    def _counts(self) -> dict[str, float]:
        return {labels[0]: value for labels, value in self._registry.counts(REQUESTS_REFUSED).items()} | self._counted
