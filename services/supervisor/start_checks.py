"""start_checks: checks of the settings before an installation starts. They change nothing."""

from __future__ import annotations

from millstream.services.errors import invalid
from millstream.services.process.memory_share import check_memory, total_bytes
from millstream.services.settings import Settings
from millstream.services.supervisor.pool_specs import check_device_memory, memory_of_pools, worker_counts
from millstream.services.tls.files import TlsFiles
from millstream.services.tls.identity import load_identity


def check_start(settings: Settings) -> None:
    """Raise Failure(INVALID) if an installation with these settings cannot start, or must not."""
    check_tls(settings)
    check_device_memory(settings.pools, settings.worker_device)
    memory = memory_of_pools(settings.pools, settings.worker_memory)
    check_memory(memory, worker_counts(settings.pools), total_bytes())


def check_tls(settings: Settings) -> None:
    """Check the certificates of the listeners. Raises Failure(INVALID)."""
    files = TlsFiles.of(settings)
    if files is None:
        return
    load_identity(files)
    if files.client_ca is not None and settings.client_cert_file is None:
        raise invalid(
            "MILLSTREAM_TLS_CLIENT_CA_FILE: `millstream up` calls its own gateways, too: set "
            "MILLSTREAM_CLIENT_CERT_FILE and MILLSTREAM_CLIENT_KEY_FILE to a certificate of these authorities"
        )
