"""What a run of the benchmarks finds: figures with their bounds, and the raw numbers behind them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.bench.load import Load


@dataclass(frozen=True)
class Figure:
    """One line of the result. `bound` is the lowest wanted value, or the highest one if `at_most`."""

    name: str
    measured: float
    bound: float
    unit: str
    detail: str
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound


@dataclass(frozen=True)
class Measured:
    """A named load with the medians of its measurements, for the table of raw numbers."""

    name: str
    connections: int
    load: Load


@dataclass(frozen=True)
class BatchCost:
    """What a batch costs at so many connections.

    `cpu_us` is by process, `redis_calls` are commands of Redis, those within scripts included.
    """

    connections: int
    rows: float
    cpu_us: dict[str, float]
    redis_calls: float


@dataclass(frozen=True)
class Result:
    """The results of one run of the benchmarks."""

    figures: tuple[Figure, ...]
    loads: tuple[Measured, ...]
    costs: tuple[BatchCost, ...] = ()
