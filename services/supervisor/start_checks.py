"""Before an installation starts: checks of its settings, which change nothing, and the folders of its home."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType

from millstream.services.environment import client_variable
from millstream.services.errors import Code, Failure, invalid
from millstream.services.installation import FILE
from millstream.services.plugin.registry import contributions
from millstream.services.process.machine_share import check_memory, total_bytes
from millstream.services.process.private_files import make_private_folder
from millstream.services.settings import Settings
from millstream.services.supervisor.pool_specs import check_device_memory, memory_of_pools, worker_counts
from millstream.services.tls.files import TlsFiles
from millstream.services.tls.identity import load_identity


def check_start(settings: Settings) -> str:
    """Return a warning of memory that workers do not have, or "".

    Raises Failure, mostly INVALID, if an installation with these settings cannot start, or must not.
    """
    if settings.gateways:
        check_tls(settings)
    else:
        check_workers_alone(settings)
    check_device_memory(settings.pools)
    memory = memory_of_pools(settings.pools, settings.worker_memory)
    return check_memory(memory, worker_counts(settings.pools), total_bytes())


def check_workers_alone(settings: Settings) -> None:
    """Check the settings of a host without gateways. Raises Failure."""
    if settings.redis_url is None:
        raise invalid("--gateways 0: name the Redis of the gateways with --redis or MILLSTREAM_REDIS_URL")
    if settings.preload.strip() not in {"", "none"} or any(
        build(settings) for build in contributions("preload", FunctionType)
    ):
        raise invalid(
            "--gateways 0: models are loaded through a gateway: name --preload, --triton-repository and --example "
            "where the gateways run"
        )
    repository = settings.repository_dir.expanduser()
    if settings.installation_name is None and not (repository / FILE).exists():
        raise Failure(
            Code.UNAVAILABLE,
            f"--gateways 0: {repository} is not the repository of the gateways: mount it there, after their first "
            "start, or set MILLSTREAM_INSTALLATION_NAME to that of theirs",
        )


def check_tls(settings: Settings) -> None:
    """Check the certificates of the listeners. Raises Failure(INVALID)."""
    files = TlsFiles.of(settings)
    if files is None:
        return
    load_identity(files)
    if files.client_ca is not None and client_variable("MILLSTREAM_CLIENT_CERT_FILE") is None:
        raise invalid(
            "MILLSTREAM_TLS_CLIENT_CA_FILE: `millstream up` calls its own gateways, too: set "
            "MILLSTREAM_CLIENT_CERT_FILE and MILLSTREAM_CLIENT_KEY_FILE to a certificate of these authorities"
        )


def make_home(home: Path) -> None:
    """Create the folders of a home, private to this user. Raises Failure(INVALID) if they cannot be written.

    An existing folder that is not empty and not a home keeps its mode, since it may contain other files; only the
    folders created in it are private.
    """
    try:
        if not home.exists() or (home / "run" / "lock").exists() or not any(home.iterdir()):
            make_private_folder(home)
        for name in ("logs", "run", "repository"):
            make_private_folder(home / name)
        (home / "run" / "lock").touch()
    except OSError as error:
        raise invalid(f"--home {home}: cannot be written ({error.strerror}); choose another folder") from error
