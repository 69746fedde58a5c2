"""Builds what decides which calls a gateway takes: keys, pages of other origins; and their records."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter as Counts
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.access.gate import Gate, Keyless
from millstream.gateway.access.key_watch import KeyWatch
from millstream.gateway.access.principal import KeyCounters
from millstream.services.access.access_keys import AccessKeys
from millstream.services.access.audit_log import AuditLog
from millstream.services.allowed_hosts import AllowedHosts
from millstream.services.local_token import keep_token
from millstream.services.metrics import catalogue
from millstream.services.metrics.catalogue import REQUESTS_REFUSED
from millstream.services.metrics.registry import Counter, MetricsRegistry
from millstream.services.process.logs import about
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.settings import Settings

log = logging.getLogger("millstream.refusals")

INTERVAL_S = 60.0


class RefusalLog:
    """Logs how many requests this process refused, from its own counters.

    Args:
        registry: has the counters.
    """

    def __init__(self, registry: MetricsRegistry) -> None:
        self._registry = registry
        self._counted: Counts[str] = Counts()
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


class AccessControl:
    """The access control of one gateway.

    Args:
        name: of this gateway.
        settings: of the installation.
        registry: gets the metrics of keys, and has the counters of refusals.
        cluster_state: tells other gateways which keys this one has read.
    """

    def __init__(self, name: str, settings: Settings, registry: MetricsRegistry, cluster_state: ClusterState) -> None:
        folder, host = settings.repository_dir.absolute(), socket.gethostname()
        self.gate = _gate(settings, registry)
        self.keys = KeyWatch(name, self.gate, AccessKeys(folder), cluster_state, settings, registry)
        self.audit = AuditLog(folder, f"{host}-{registry.process}")
        self.refusals = RefusalLog(registry)
        hosts = AllowedHosts(settings.allowed_host_list, (host, settings.host))
        self.browser_guard = BrowserGuard(settings.cors_origin_list, hosts, self.refusals.count)

    def loops(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return what runs while the gateway serves, from after `keys.start` on."""
        return self.keys.run(), self.keys.settle(), self.refusals.run()


def counters_of(counter: Callable[..., Counter], name: str) -> KeyCounters:
    """Return the counters of a key. `counter`: that of a registry."""
    return KeyCounters(
        name,
        lambda outcome: counter(catalogue.KEY_REQUESTS, name, outcome),
        counter(catalogue.KEY_ROWS, name),
        counter(catalogue.KEY_RUN_SECONDS, name),
    )


def _gate(settings: Settings, registry: MetricsRegistry) -> Gate:
    key = None if settings.admin_key is None else settings.admin_key.get_secret_value()
    of_metrics = None if settings.metrics_key is None else settings.metrics_key.get_secret_value()
    return Gate(
        key,
        lambda name: counters_of(registry.counter, name),
        metrics_key=of_metrics,
        local_token=keep_token(settings.home),
        keyless=Keyless(settings.open_control, warns=settings.keys == "warn"),
    )
