"""Serves the metrics of the workers of a host that has no gateway, and whether they are ready."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

from millstream.services.allowed_hosts import AllowedHosts
from millstream.services.errors import Code, Failure
from millstream.services.metrics.page import serve
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.settings import Settings
from millstream.services.supervisor.own_log import NAME


class MetricsPort:
    """The port. Raises Failure(CONFLICT) if it is taken.

    Args:
        metrics_dir: the folder with the metrics of all processes.
        ready: returns whether the workers are ready.
    """

    def __init__(self, settings: Settings, metrics_dir: Path, ready: Callable[[], bool]) -> None:
        port = settings.metrics_port
        self._registry = MetricsRegistry(metrics_dir, NAME, models_max=settings.metrics_models_max)
        hosts = AllowedHosts(settings.allowed_host_list, (platform.node(),))
        try:
            self._server, self._thread = serve(port, self._registry, hosts, ready=ready)
        except OSError as error:
            raise Failure(
                Code.CONFLICT,
                f"port {port} for metrics: {error.strerror}: choose another with MILLSTREAM_METRICS_PORT",
            ) from error

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._registry.close()
