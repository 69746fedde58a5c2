"""What plug-ins add to the supervisor of a machine, and what of the supervisor they may use.

contributions("supervisor"): build(SupervisorParts) ─> a part ─> started when the installation serves, stopped first
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import FunctionType
from typing import Protocol

from millstream.services.plugin.registry import contributions
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.url import RedisAddress
from millstream.services.settings import Settings
from millstream.services.supervisor.child import Child


@dataclass(frozen=True, slots=True)
class SupervisorParts:
    """The parts of a supervisor that those of plug-ins may use. All are called in its event loop."""

    settings: Settings  # of its children
    address: RedisAddress
    keys: InstallationKeys
    workers: Callable[[], Collection[Child]]  # without those that drain
    draining: Callable[[], Collection[Child]]  # workers that were told to stop
    start_worker: Callable[[str, int], None]  # pool, number in the pool
    drain_worker: Callable[[Child], None]
    may_resize: Callable[[str], bool]  # pool -> whether no worker of it is being replaced, and nothing is stopped
    show: Callable[[str], None]  # shows and logs a line


class SupervisorPart(Protocol):
    """What a plug-in adds."""

    def start(self) -> None:
        """Begin. Called once, in a running event loop."""

    async def stop(self) -> None:
        """End within a few seconds, also without Redis."""


def build_parts(of: SupervisorParts) -> tuple[SupervisorPart, ...]:
    """Return the parts that plug-ins add. Raises Failure: one cannot be built."""
    return tuple(build(of) for build in contributions("supervisor", FunctionType))
