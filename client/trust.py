"""trust: which servers a client trusts over TLS, and the certificate that it shows to servers that ask for one.

ca_file given ─> certificates of these authorities        pinned ─> exactly this certificate        else ─> the system's
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.services.errors import invalid

if TYPE_CHECKING:
    from millstream.services.settings import Settings

#: X509_V_FLAG_NO_CHECK_TIME, which the ssl module has no name for
_NO_CHECK_TIME = 0x200000
_END = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class Trust:
    """The files that decide it.

    Attributes:
        ca_file: certificates of authorities to trust instead of the system's.
        pinned: a file whose first certificate is that of the server, the only one to trust: an installation on this
            machine, whose certificate names the host by which others call it.
        certificate: certificate of the client, with its chain; `key` has its private key.
    """

    ca_file: Path | None = None
    pinned: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def of(cls, settings: Settings, ca_file: Path | None = None, pinned: Path | None = None) -> Trust:
        """Return what the settings say; `ca_file` and `pinned` come first. Raises Failure(INVALID)."""
        certificate, key = settings.client_cert_file, settings.client_key_file
        if (certificate is None) != (key is None):
            raise invalid("set both MILLSTREAM_CLIENT_CERT_FILE and MILLSTREAM_CLIENT_KEY_FILE, or neither")
        return cls(ca_file or (None if pinned else settings.ca_file), pinned, certificate, key)

    def context(self) -> ssl.SSLContext:
        """Return a TLS context for a connection. Raises Failure(INVALID) that names a file which cannot be used."""
        context = self._verifying()
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key, password=str)
            except OSError as error:  # ssl.SSLError is one
                reason = error.strerror or error
                raise invalid(f"client certificate {self.certificate}, key {self.key}: {reason}") from error
        return context

    def _verifying(self) -> ssl.SSLContext:
        try:
            if self.pinned is not None:
                return _pinning(self.pinned.read_text("ascii", "replace"))
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise invalid(f"ca_file {self.ca_file or self.pinned}: {error.strerror or error}") from error


def _pinning(content: str) -> ssl.SSLContext:
    """Return a context that trusts one certificate, whatever names and dates it has."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags = ssl.VerifyFlags(ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME)
    context.load_verify_locations(cadata=content[: content.find(_END) + len(_END)])
    return context


#: the authorities of the system, and no certificate of the client's own
SYSTEM_TRUST = Trust()
