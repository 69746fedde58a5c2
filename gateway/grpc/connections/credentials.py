"""credentials: the TLS credentials of the gRPC server, whose new connections get the newest certificate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from millstream.services.tls.identity import Identity


def server_credentials(identity: Callable[[], Identity]) -> Any:
    """Return credentials that follow `identity`, which the library's threads call at each new connection."""
    current = identity()
    given = current

    def fetch() -> Any:
        """Return the configuration of a new identity; None: the library keeps the one that it has."""
        nonlocal given
        newest = identity()
        if newest is given:
            return None
        given = newest
        return _configuration(newest)

    # Whether clients need a certificate is a setting, and does not change while the server runs.
    return grpc.dynamic_ssl_server_credentials(
        _configuration(current), fetch, require_client_authentication=current.contents.client_ca is not None
    )


def _configuration(identity: Identity) -> Any:
    contents = identity.contents
    return grpc.ssl_server_certificate_configuration([(contents.key, contents.certificate)], contents.client_ca)
