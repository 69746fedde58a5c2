"""The pools of a simulation: --pool NAME=WORKERS[,memory=SIZE][,speed=X][,runs=N][,loads=N] ─> SimulatedPool."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from millstream.plugins.plan.simulation.fleet_options import SimulatedPool
from millstream.plugins.plan.simulation.models import SimulatedModel
from millstream.services.nearest_names import nearest
from millstream.services.placement.pools import unknown_pool
from millstream.services.process.machine_share import parse_size

WORKERS_MAX = 10_000
POOLS_MAX = 16
SPEED_MIN, SPEED_MAX = 0.001, 1000.0
RUNS_MAX, LOADS_MAX = 1024, 64
OPTIONS = ("memory", "speed", "runs", "loads")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def parse_pools(texts: Sequence[str], default: SimulatedPool) -> tuple[SimulatedPool, ...]:
    """Return the pools that are written so, the preferred one first. Raises ValueError with one line.

    Args:
        texts: like "gpu=1,memory=16GiB,speed=8".
        default: has what a pool does not say.
    """
    if len(texts) > POOLS_MAX:
        raise ValueError(f"--pool: {POOLS_MAX} pools are the most")
    pools = tuple(_parse_pool(text, default) for text in texts)
    names = [pool.name for pool in pools]
    twice = next((name for name in names if names.count(name) > 1), "")
    if twice:
        raise ValueError(f"--pool: the pool {twice} is named twice")
    return pools


def check_pools(models: Iterable[SimulatedModel], pools: Sequence[SimulatedPool]) -> None:
    """Raise Failure(INVALID), one line, if a model names a pool that the simulation does not have."""
    names = [pool.name for pool in pools]
    for model in models:
        for pool in model.pools:
            if pool not in names:
                raise unknown_pool(f"model '{model.name}'", pool, names)


def _parse_pool(text: str, default: SimulatedPool) -> SimulatedPool:
    head, *rest = text.split(",")
    name, equals, workers = head.partition("=")
    if not (equals and _NAME.fullmatch(name)):
        raise ValueError(f"--pool {text}: write NAME=WORKERS, like gpu=1,memory=16GiB,speed=8")
    given: dict[str, str] = {}
    for part in rest:
        option, equals, value = part.partition("=")
        if option not in OPTIONS or not equals:
            near = nearest(option, OPTIONS)
            meant = f"did you mean {near[0]}=?" if near else f"the options are {', '.join(OPTIONS)}"
            raise ValueError(f"--pool {text}: there is no option {option}; {meant}")
        if option in given:
            raise ValueError(f"--pool {text}: {option} is given twice")
        given[option] = value
    memory_bytes = parse_size(given["memory"]) if "memory" in given else default.memory_bytes
    if memory_bytes < 1:
        raise ValueError(f"--pool {text}: memory is a size like 8GiB")
    return SimulatedPool(
        name,
        int(_number(text, "workers", workers, 1, WORKERS_MAX)),
        memory_bytes,
        int(_number(text, "loads", given.get("loads", str(default.loads)), 1, LOADS_MAX)),
        int(_number(text, "runs", given.get("runs", str(default.runs)), 1, RUNS_MAX)),
        _number(text, "speed", given.get("speed", str(default.speed)), SPEED_MIN, SPEED_MAX),
    )


def _number(text: str, what: str, value: str, least: float, most: float) -> float:
    whole = what != "speed"
    if not re.fullmatch(r"\d{1,6}" if whole else r"\d{1,6}(\.\d{1,6})?", value) or not least <= float(value) <= most:
        raise ValueError(f"--pool {text}: {what} is a number from {least:g} to {most:g}")
    return float(value)
