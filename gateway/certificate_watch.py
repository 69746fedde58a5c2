"""Loop that reads the files of the TLS listeners again and again, and takes what is usable.

files ─> changed? ─> usable? ─> `identity`, which new connections get
                        no  ─> the identity that is served stays; one warning

The files are read as a whole each time, and not only when their times change: a Kubernetes volume swaps a symlink, and
a copy may keep times. A certificate is often renewed before its key, so contents that are not usable are looked at
twice before a warning.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from millstream.services.errors import Failure
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.process.logs import about
from millstream.services.tls.files import Contents, TlsFiles
from millstream.services.tls.identity import Identity, check_identity

log = logging.getLogger("millstream.tls")

EVERY_S = 2.0  # pause between two looks at the files


class CertificateWatch:
    """The certificate of a gateway's listeners. Raises Failure if it cannot be used at the start.

    Args:
        files: Where it is.
        registry: Gets the gauge of its expiry.
        listeners: Values of the gauge's label: the listeners that are on.
        clock: Returns the seconds since the epoch.
    """

    def __init__(
        self,
        files: TlsFiles,
        registry: MetricsRegistry,
        listeners: Sequence[str],
        clock: Callable[[], float] = time.time,  # noqa: TID251 - certificates have dates
    ) -> None:
        self._files = files
        self._clock = clock
        self._gauges = [registry.gauge(catalogue.TLS_CERTIFICATE_EXPIRY, listener) for listener in listeners]
        self._seen: Contents | str | None = None  # what could not be used at the last look, or why it was not read
        self._warned = False
        self._take(check_identity(files, files.read()))
        # Served all the same: this machine's clock may be wrong, and clients decide.
        if fault := self._fault(self.identity):
            log.warning("%s; it is served, and clients will refuse it", fault)

    def _take(self, identity: Identity) -> None:
        self.identity = identity
        for gauge in self._gauges:
            gauge.set(identity.validity.ends)

    async def run(self) -> None:
        """Look at the files until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Read the files, and take what they contain if it is new and usable."""
        try:
            contents = await asyncio.to_thread(self._files.read)  # a network file system may take its time
        except Failure as failure:
            self._refuse(failure.message, failure.message)
            return
        if contents == self.identity.contents:
            self._seen, self._warned = None, False
            return
        try:
            identity = await asyncio.to_thread(check_identity, self._files, contents)
        except Failure as failure:
            self._refuse(contents, failure.message)
            return
        if (fault := self._fault(identity)) and not self._fault(self.identity):
            self._refuse(contents, fault)
            return
        self._take(identity)
        self._seen, self._warned = None, False
        values = about(certificate=self._files.certificate)
        log.info("new connections get the certificate that %s now has", self._files.certificate, extra=values)

    def _refuse(self, seen: Contents | str, why: str) -> None:
        """Keep the identity that is served. Warn once about `seen`, at the second look."""
        if seen != self._seen:
            self._seen, self._warned = seen, False
        elif not self._warned:
            self._warned = True
            log.warning("the certificate that was read before is still served: %s", why)

    def _fault(self, identity: Identity) -> str:
        """Return why clients whose clock agrees with this machine's will refuse a certificate; empty if they do not."""
        now = self._clock()
        if identity.expired(now):
            return f"the certificate in {self._files.certificate} expired at {_date(identity.validity.ends)}"
        if identity.premature(now):
            return f"the certificate in {self._files.certificate} is not valid before {_date(identity.validity.begins)}"
        return ""


def _date(instant: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(instant))
