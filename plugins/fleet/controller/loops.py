"""The loops of one controller, in a process of its own or in the supervisor of a machine, and their start and stop."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from millstream.plugins.fleet.controller.autoscale.decision import ScaleLimits
from millstream.plugins.fleet.controller.autoscaler import Autoscaler
from millstream.plugins.fleet.controller.controller import Controller
from millstream.plugins.fleet.controller.leadership import LEASE_S, Leadership
from millstream.plugins.fleet.controller.metrics import ControllerMetrics, ScaleMetrics
from millstream.plugins.fleet.scale_state import ScaleState
from millstream.plugins.fleet.settings import FleetSettings
from millstream.services.installation import shared_metrics
from millstream.services.metrics.process import ProcessMetrics
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.leader_lock import LeaderLock
from millstream.services.queue.url import RedisAddress
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import Settings, settings_of
from millstream.services.supervisor.pool_specs import WORKERS_MAX, parse_pools
from millstream.services.wire.worker_id import new_start

NAME = "controller"
LOGGER = "millstream.controller"  # of all that it does


class ControllerLoops:
    """The loops of one controller.

    Args:
        limits: of pools that an operator has named, for autoscaling.
    """

    def __init__(
        self, settings: Settings, address: RedisAddress, keys: InstallationKeys, limits: Mapping[str, ScaleLimits]
    ) -> None:
        self.registry = MetricsRegistry(shared_metrics(settings), NAME)
        self._process_metrics = ProcessMetrics(self.registry)
        self._cluster_state = ClusterState(address, keys)
        name = f"{NAME}-{platform.node()}-{new_start()}"
        self._lock = LeaderLock(address, keys, name, LEASE_S)
        self._leadership = Leadership(self._lock, self._on_lead)
        self._controller = Controller(
            self._leadership,
            self._lock,
            self._cluster_state,
            FolderRepository(settings.repository_dir),
            ControllerMetrics(self.registry),
        )
        self._autoscaler = Autoscaler(
            lambda: self._leadership.token > 0,
            self._cluster_state,
            ScaleState(address, keys),
            limits,
            limits_of(settings, 0, WORKERS_MAX, bounded=False),
            ScaleMetrics(self.registry),
        )

    def start(self) -> None:
        self._process_metrics.start()
        self._leadership.start()
        self._controller.start()
        self._autoscaler.start()

    async def stop(self) -> None:
        """Stop in order: no order after the lead is released."""
        await self._autoscaler.stop()
        await self._controller.stop()
        await self._leadership.stop()
        await self._lock.close()
        await self._cluster_state.close()
        self._process_metrics.stop()
        self.registry.close()

    def _on_lead(self) -> None:
        self._controller.wake()


def limits_of(settings: Settings, workers_min: int, workers_max: int, *, bounded: bool = True) -> ScaleLimits:
    """Return what autoscaling may do with a pool."""
    own = settings_of(settings, FleetSettings)
    return ScaleLimits(workers_min, workers_max, own.scale_latency_ms / 1000, own.scale_down_s, bounded)


def scale_limits(settings: Settings) -> dict[str, ScaleLimits]:
    """Return what autoscaling may do with each pool that an operator has named; the setting's default names none."""
    if "pools" not in settings.model_fields_set or not settings.pools.strip():
        return {}
    return pool_limits(settings)


def pool_limits(settings: Settings) -> dict[str, ScaleLimits]:
    """Return what autoscaling may do with each pool of the setting."""
    specs = parse_pools(settings.pools)
    return {pool: limits_of(settings, spec.least, spec.workers) for pool, spec in specs.items()}
