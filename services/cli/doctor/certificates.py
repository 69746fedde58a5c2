"""Checks of the certificate that the listeners have: its files, its key's mode, and until when it is valid."""

from __future__ import annotations

import stat
import time
from typing import TYPE_CHECKING

from millstream.services.cli.doctor.check import Check
from millstream.services.errors import Failure

if TYPE_CHECKING:
    from millstream.services.settings import Settings
    from millstream.services.tls.files import TlsFiles
    from millstream.services.tls.identity import Identity

#: days before the end from which the alert MillstreamCertificateExpires fires
DAYS_LEFT_MIN = 14
_SECONDS_OF_DAY = 86400
_NAME = "Certificate"


def certificate_checks(settings: Settings) -> list[Check]:
    """Return the checks of the certificate; nothing if the listeners do without TLS."""
    from millstream.services.tls.files import TlsFiles
    from millstream.services.tls.identity import load_identity

    try:
        files = TlsFiles.of(settings)
        if files is None:
            return []
        identity = load_identity(files)
    except Failure as failure:
        return [Check(_NAME, "fail", failure.message, "a gateway that runs keeps its certificate; none would start")]
    now = time.time()  # noqa: TID251 - certificates have dates
    return [_validity(files, identity, now), *_key_mode(files)]


def _validity(files: TlsFiles, identity: Identity, now: float) -> Check:
    ends = time.strftime("%Y-%m-%d", time.gmtime(identity.validity.ends))
    detail = f"{files.certificate} fits its key"
    if files.client_ca is not None:
        detail += ", clients need one of theirs"
    if identity.expired(now):
        return Check(_NAME, "warn", f"{detail}, and expired on {ends}", "clients refuse it: renew it")
    if identity.premature(now):
        return Check(_NAME, "warn", f"{detail}, and is not valid yet", "clients refuse it: check this machine's clock")
    days = int((identity.validity.ends - now) // _SECONDS_OF_DAY)
    detail = f"{detail}, expires on {ends}, in {days} days"
    if days < DAYS_LEFT_MIN:
        return Check(_NAME, "warn", detail, "renew it: gateways read the new files without a restart")
    return Check(_NAME, "ok", detail)


def _key_mode(files: TlsFiles) -> list[Check]:
    if files.key.stat().st_mode & stat.S_IROTH:
        advice = f"who has it can pretend to be this server: chmod o-r {files.key}"
        return [Check("Private key", "warn", f"all users may read {files.key}", advice)]
    return []
