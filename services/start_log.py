"""What a process logs first: its version and the settings that differ from the defaults, without secrets."""

from __future__ import annotations

import logging
import os
import platform

from millstream.services.process.logs import about
from millstream.services.settings import Settings, changed_settings, unknown_variables
from millstream.services.version import VERSION

log = logging.getLogger("millstream.process")


def log_start(settings: Settings, name: str, *, supervised: bool) -> None:
    """Log the start of the process `name`, and variables that are no settings.

    A supervised process does not repeat what its supervisor logged of the environment.
    """
    values = {} if supervised else changed_settings(settings)
    listed = ", ".join(f"{field}={value}" for field, value in values.items()) or "defaults"
    log.info(
        "%s of Millstream %s starts (pid %d, Python %s)%s",
        name,
        VERSION,
        os.getpid(),
        platform.python_version(),
        "" if supervised else f"; settings: {listed}",
        extra=about(version=VERSION, **values),
    )
    if not supervised:
        for unknown in unknown_variables():
            log.warning("%s", unknown)
