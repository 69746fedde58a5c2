"""`python -m millstream.services.health WHERE PATH`: exits with 0 if a server of this machine answers with 200.

For the health checks of images: they hold no curl, and their servers may speak TLS with any certificate. WHERE is the
URL of the server, or a file with it. A gateway that has TLS is asked over TLS, also if the URL says http. One that asks
for a certificate of clients is alive if it refuses this client, which has none.
"""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

from millstream.services.settings import has_tls

TIMEOUT_S = 2.0
#: the alerts by which a server refuses a client without a certificate: TLS 1.3, and TLS 1.2
_CERTIFICATE_WANTED = frozenset({"TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_HANDSHAKE_FAILURE"})


def fault(url: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """Return why the server at `url` is not healthy; None: it is.

    Args:
        url: with the path; the certificate of an https server is not verified, as it is asked on its own machine.
        timeout_s: seconds for each step of the request.
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=timeout_s, context=context):  # noqa: S310 - the caller's own URL
            return None
    except urllib.error.HTTPError as error:
        return f"{url} answers {error.code}"
    except OSError as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, ssl.SSLError) and cause.reason in _CERTIFICATE_WANTED:
            return None
        return f"{url} does not answer: {cause}"


def main(where: str, path: str) -> str | None:
    """Return what is wrong with the server at `where`, a URL or a file with one; None: nothing."""
    url = where if "://" in where else Path(where).read_text().strip()
    if has_tls():
        url = url.replace("http://", "https://", 1)
    return fault(url + path)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
