"""The models of a simulation: their memory, load and run times, read from a file or made up from a seed. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millstream.services.placement.views import Footprint

MB = 1_000_000
#: Memory of an application in "Serverless in the Wild": median 170 MB, 90 % below 400 MB; here as a log-normal.
MEDIAN_BYTES = 170 * MB
SIGMA_BYTES = math.log(400 / 170) / 1.2816
BYTES_MIN, BYTES_MAX = 5 * MB, 1500 * MB
LOAD_BYTES_PER_S = 250 * MB  # read, parse and optimise the graph, warm up: about what ONNX Runtime does on two cores
LOAD_FIXED_S = 0.2
MEDIAN_RUN_S, SIGMA_RUN = 0.015, 0.8
#: of a model in a file that names its memory alone
PEAK_SHARE = 0.1
SETTINGS = ("instances_min", "instances_max", "idle_s")  # columns of a table


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """One model of a simulation.

    Args:
        run_s: seconds that one call takes.
        pin: whether it stays loaded.
        instances_min: instances that are always loaded.
        instances_max: most instances; 0: no limit.
        idle_s: seconds without a call until it is unloaded; 0: only if memory is short.
        pools: that may serve it, the preferred one first; empty: all.
    """

    name: str
    footprint: Footprint
    run_s: float
    pin: bool = False
    instances_min: int = 0
    instances_max: int = 0
    idle_s: float = 0.0
    pools: tuple[str, ...] = ()


def generated_models(number: int, seed: int) -> list[SimulatedModel]:
    """Return models with sizes as in "Serverless in the Wild" (ATC 2020), load times that grow with the size."""
    random = np.random.default_rng([seed, 1])
    sizes = np.clip(MEDIAN_BYTES * np.exp(SIGMA_BYTES * random.standard_normal(number)), BYTES_MIN, BYTES_MAX)
    loads_s = LOAD_FIXED_S + sizes / LOAD_BYTES_PER_S * np.exp(0.4 * random.standard_normal(number))
    runs_s = np.minimum(1.0, MEDIAN_RUN_S * np.exp(SIGMA_RUN * random.standard_normal(number)))
    return [
        SimulatedModel(
            f"model-{at:05d}", Footprint(int(size), int(PEAK_SHARE * size), float(load_s), True), float(run_s)
        )
        for at, (size, load_s, run_s) in enumerate(zip(sizes, loads_s, runs_s, strict=True))
    ]


def read_models(rows: Sequence[Mapping[str, Any]]) -> list[SimulatedModel]:
    """Return the models of a table. Raises ValueError, which names the row and the column.

    Args:
        rows: `name` and `memory_bytes`, and maybe `peak_bytes`, `load_s`, `run_s`, `pin`, `instances_min`,
            `instances_max`, `idle_s`, and `pools`: a list, or names with spaces between them.
    """
    models = [_read_model(row, at) for at, row in enumerate(rows, 1)]
    names = [model.name for model in models]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"model {twice!r} is there twice")
    if not models:
        raise ValueError("there is no model in it")
    return models


def _read_model(row: Mapping[str, Any], at: int) -> SimulatedModel:
    name = str(row.get("name") or "")
    if not name:
        raise ValueError(f"row {at}: a model needs a name")
    size = _number(row, "memory_bytes", at)
    if size is None or size < 1:
        raise ValueError(f"row {at}, model {name!r}: memory_bytes must be a number of bytes")
    peak, load_s, run_s = (_number(row, column, at) for column in ("peak_bytes", "load_s", "run_s"))
    smallest, largest, idle_s = (_number(row, column, at) or 0.0 for column in SETTINGS)
    if largest and smallest > largest:
        raise ValueError(f"row {at}, model {name!r}: instances_min is more than instances_max")
    return SimulatedModel(
        name,
        Footprint(
            int(size),
            int(PEAK_SHARE * size if peak is None else peak),
            LOAD_FIXED_S + size / LOAD_BYTES_PER_S if load_s is None else load_s,
            True,
        ),
        MEDIAN_RUN_S if run_s is None else run_s,
        str(row.get("pin", "")).lower() in {"1", "true", "yes"},
        int(smallest),
        int(largest),
        idle_s,
        _pools(row, at),
    )


def _pools(row: Mapping[str, Any], at: int) -> tuple[str, ...]:
    value = row.get("pools") or ()
    names = value.split() if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"row {at}: pools is {str(value)[:64]!r}; write names with spaces between them")
    if len(set(names)) != len(names):
        raise ValueError(f"row {at}: each pool is named once")
    return tuple(names)


def _number(row: Mapping[str, Any], column: str, at: int) -> float | None:
    value = row.get(column)
    if value is None or value == "":
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"row {at}: {column} is {str(value)[:64]!r}, which is no number") from None
    if not 0 <= number < math.inf:
        raise ValueError(f"row {at}: {column} is {number:g}, which is no size or duration")
    return number
