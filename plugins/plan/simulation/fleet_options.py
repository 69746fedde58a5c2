"""The pools and workers of a simulation. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.plugins.plan.simulation.fleet_state import POOL, SimulatedWorker

ROUND_S = 10.0  # between two rounds of the controller; a real one has a round every 2 s


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """The workers of one pool.

    Args:
        memory_bytes: of one worker, for models.
        loads: loads that a worker makes at the same time.
        runs: runs that a worker makes at the same time.
        speed: how many times as fast its runs are as those of the table of models.
    """

    name: str
    workers: int
    memory_bytes: int
    loads: int = 1
    runs: int = 2
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The simulated workers.

    Args:
        memory_bytes: of one worker, for models.
        loads: loads that a worker makes at the same time.
        runs: runs that a worker makes at the same time.
        timeout_s: how long a call waits.
        round_s: between two rounds of the controller; 0: there is no controller.
        restart_s: after which the next worker is replaced, one after the other; 0: none is.
        pools: the pools, the preferred one first; empty: one, of the workers above.
    """

    workers: int
    memory_bytes: int
    loads: int = 1
    runs: int = 2
    timeout_s: float = 30.0
    round_s: float = ROUND_S
    restart_s: float = 0.0
    pools: tuple[SimulatedPool, ...] = ()

    def each_pool(self) -> tuple[SimulatedPool, ...]:
        """Return the pools, at least one."""
        return self.pools or (SimulatedPool(POOL, self.workers, self.memory_bytes, self.loads, self.runs),)


def workers_of(options: FleetOptions) -> list[SimulatedWorker]:
    """Return the workers of all pools, which hold nothing."""
    workers: list[SimulatedWorker] = []
    for pool in options.each_pool():
        for _ in range(pool.workers):
            slots = [0.0] * pool.runs
            workers.append(SimulatedWorker(len(workers), pool.memory_bytes, slots, pool.name, pool.speed, pool.loads))
    return workers
