"""What decides which calls a gateway takes: keys, as the repository has them, and pages of other origins.

event "keys", or a new stamp of the folder ─> read ─> Gate.load ─> Redis: this change is read
accounts ─> Redis ─> accounts of all gateways
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter as Counts
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.access.gate import Gate, Keyless
from millstream.gateway.access.principal import KeyCounters
from millstream.services.access.access_keys import AccessKeys, StoredKeys
from millstream.services.access.audit_log import AuditLog
from millstream.services.access.limits import Settlement, write_use
from millstream.services.access.secret import access_secret, derive_secret
from millstream.services.allowed_hosts import AllowedHosts
from millstream.services.errors import Failure
from millstream.services.local_token import keep_token
from millstream.services.metrics import catalogue
from millstream.services.metrics.catalogue import KEY_EXPIRY, REQUESTS_REFUSED
from millstream.services.metrics.registry import Counter, MetricsRegistry
from millstream.services.process.logs import about
from millstream.services.process.waits import next_tick
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.limited_client import without_redis_after
from millstream.services.settings import Settings

log = logging.getLogger("millstream.access")
refusals_log = logging.getLogger("millstream.refusals")

#: between two looks at the folder, for changes whose event was lost
POLL_S = 2.0
#: between two settlements, while keys with limits are in use; a key may exceed its limit by what is let in meanwhile
SETTLE_S = 0.2
#: how long a gateway goes on telling what keys used through it after the last call
BUSY_S = 1.0
#: between two looks whether there are keys with limits, while there are none
IDLE_S = 1.0
#: between two log lines about calls that are served and will be refused
WARN_S = 60.0
#: longest wait of a change for the other gateways; a slower one reads the keys at its next look
AGREE_S_MAX = 4.0
AGREE_PAUSE_S = 0.005
#: longest wait for Redis before the keys are read, which are in the repository: a revocation does not wait for it
TELL_S_MAX = 0.5


class KeyWatch:
    """The keys of one gateway, which is called `name`."""

    def __init__(
        self,
        name: str,
        gate: Gate,
        stored: AccessKeys,
        cluster_state: ClusterState,
        settings: Settings,
        registry: MetricsRegistry,
    ) -> None:
        self.stored = stored
        self._name = name
        self._gate = gate
        self._cluster_state = cluster_state
        self._settings = settings
        self._registry = registry
        self._settlement = Settlement()
        self._reading = asyncio.Lock()
        self._stamp: object = None
        self._change = 0  # the last change of the keys that this gateway has read, as Redis counts them
        self._secret: bytes | None = None
        self._without_secret = ""  # why there is no access secret, as the log says
        self._expiring: set[str] = set()

    async def start(self) -> None:
        """Read the keys. Raises Failure: without them, the gateway must not start."""
        await self.reload()

    async def reload(self, _: str = "") -> None:
        """Read the keys. Raises Failure, and keeps those that it knows."""
        async with self._reading:
            change = await self._tell()  # those that are read after this are at least as new
            stamp = await asyncio.to_thread(self.stored.stamp)
            keys = await asyncio.to_thread(self.stored.read)
            self._gate.load(keys.documents, others=bool(keys.damaged))
            self._stamp = stamp
            self._show_expiries(keys)
            if change != self._change:
                self._change = change
                await self._tell()
            if keys.any:
                await self._read_secret()

    async def _tell(self) -> int:
        """Tell which change this gateway has read, and return the last one; without Redis, that which it has read."""
        try:
            async with asyncio.timeout(TELL_S_MAX):
                return await self._cluster_state.tell_keys_read(self._name, self._change)
        except (Failure, TimeoutError):
            return self._change

    async def _read_secret(self) -> None:
        """Read the access secret. Without it the keys are in force, and only signatures are refused."""
        try:
            await self.secret()
        except Failure as failure:
            if failure.message != self._without_secret:
                self._without_secret = failure.message
                log.warning("AWS signatures are refused, as there is no access secret: %s", failure.message)

    async def announce(self) -> None:
        """Apply a change of this gateway, tell the others, and wait until all have read it."""
        change = 0  # its number, from 1 on; 0: Redis did not count it
        async with without_redis_after(TELL_S_MAX):  # the others look at the folder, too
            change = await self._cluster_state.keys_changed()
        await self.reload()
        if not change:
            return
        async with without_redis_after(AGREE_S_MAX):
            while any(read < change for read in (await self._cluster_state.keys_read()).values()):
                await asyncio.sleep(AGREE_PAUSE_S)

    async def secret(self) -> bytes:
        """Return the access secret. Raises Failure."""
        if self._secret is None:
            self._secret = await asyncio.to_thread(access_secret, self._settings)
            self._gate.secret_of = self.derive
        return self._secret

    def derive(self, key_id: str, salt: str) -> str:
        """Return the secret of a key, from the access secret that was read."""
        return derive_secret(self._secret or b"", key_id, salt)

    async def run(self) -> None:
        """Look for changes of the keys, until cancelled."""
        warned_at = time.monotonic()
        while True:
            await next_tick(POLL_S)
            if self._gate.warned and time.monotonic() - warned_at >= WARN_S:
                warned_at = time.monotonic()
                self._warn()
            try:
                change = await self._tell()
                stamp = await asyncio.to_thread(self.stored.stamp)
                if stamp is None or stamp != self._stamp or change != self._change:
                    await self.reload()
            except Failure as failure:
                log.warning("the keys cannot be read, those known stay in force: %s", failure.message)
            except Exception:
                log.exception("the keys cannot be read; trying again")

    def _warn(self) -> None:
        """Log which calls were served that will be refused."""
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(self._gate.warned.items()))
        self._gate.warned.clear()
        log.warning(
            "served without a right key, as MILLSTREAM_KEYS is warn: %s; millstream_key_requests_total says of which "
            "keys. With MILLSTREAM_KEYS=enforce such calls are refused",
            counts,
        )

    async def settle(self) -> None:
        """Settle the use of keys with the other gateways, until cancelled."""
        told, told_at = "", 0.0
        while True:
            await asyncio.sleep(SETTLE_S)
            accounts = self._gate.accounts()
            if not accounts:
                await next_tick(IDLE_S)
                continue
            text, now = write_use(accounts), time.monotonic()
            if text != told:
                told, told_at = text, now
            busy = now - told_at < BUSY_S or any(account.in_flight for account in accounts.values())
            with suppress(Failure):  # without Redis nothing runs
                texts = await self._cluster_state.exchange_use(self._name, text if busy else None)
                self._settlement.apply(texts, accounts, now)

    def _show_expiries(self, keys: StoredKeys) -> None:
        shown = set()
        for document in keys.documents:
            if document.expires_at is not None and document.revoked_at is None:
                self._registry.gauge(KEY_EXPIRY, document.name).set(document.expires_at)
                shown.add(document.name)
        for name in self._expiring - shown:
            self._registry.remove(KEY_EXPIRY, name)
        self._expiring = shown


INTERVAL_S = 60.0


class RefusalLog:
    """Logs how many requests this process refused, from the counters in its registry."""

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
                refusals_log.warning("%d requests were refused within a minute: %s", refused, reason, extra=values)
        self._logged = counts

    def _counts(self) -> dict[str, float]:
        return {labels[0]: value for labels, value in self._registry.counts(REQUESTS_REFUSED).items()} | self._counted


class AccessControl:
    """The access control of one gateway, which is called `name`."""

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
