"""Days of traffic, drawn from a seed: rows in each second. Made up, like what serverless traces show; not measured.

Shapes follow "Serverless in the Wild" (Shahrad et al., USENIX ATC 2020): a diurnal mean, bursts, and timers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
DAY_S = 86_400


def diurnal(seconds: int, random: np.random.Generator) -> Array:
    """A sine over the day with a floor of a fifth, and noise that lasts minutes."""
    clock = np.arange(seconds)
    mean = 600 * (1.2 + np.sin(2 * np.pi * clock / DAY_S - 1.3)) / 2.2 + 100
    rows: Array = random.poisson(mean * _slow_noise(seconds, 300, 0.1, random)).astype(np.float64)
    return rows


def bursts(seconds: int, random: np.random.Generator) -> Array:
    """A quiet mean with bursts of 5 s to 5 min, three to ten times as high, 40 a day."""
    mean = np.full(seconds, 120.0)
    for begin in random.integers(0, seconds, round(40 * seconds / DAY_S)):
        length = int(np.exp(random.uniform(np.log(5), np.log(300))))
        mean[begin : begin + length] *= random.uniform(3, 10)
    rows: Array = random.poisson(np.minimum(mean, 1500)).astype(np.float64)
    return rows


def steps(seconds: int, random: np.random.Generator) -> Array:
    """Levels from 50 to 1000 rows/s that last 10 to 90 minutes."""
    mean = np.empty(seconds)
    at = 0
    while at < seconds:
        length = int(random.uniform(600, 5400))
        mean[at : at + length] = np.exp(random.uniform(np.log(50), np.log(1000)))
        at += length
    return random.poisson(mean).astype(np.float64)


def timers(seconds: int, random: np.random.Generator) -> Array:
    """A mean of 80 rows/s, and jobs that send 600 rows/s for 2 minutes every hour, and for 20 s every 10 minutes."""
    clock = np.arange(seconds)
    mean = np.full(seconds, 80.0)
    mean[clock % 3600 < 120] += 600
    mean[clock % 600 < 20] += 600
    return random.poisson(mean).astype(np.float64)


def recurring(seconds: int, random: np.random.Generator) -> Array:
    """A mean of 80 rows/s, and 600 rows/s more for 20 s every 10 minutes: each burst is shorter than a start."""
    mean = np.full(seconds, 80.0)
    mean[np.arange(seconds) % 600 < 20] += 600
    return random.poisson(mean).astype(np.float64)


def _slow_noise(seconds: int, lasts_s: int, deviation: float, random: np.random.Generator) -> Array:
    drawn = random.normal(0, deviation, seconds // lasts_s + 2)
    noise: Array = np.exp(np.interp(np.arange(seconds) / lasts_s, np.arange(len(drawn)), drawn))
    return noise


TRACES: dict[str, Callable[[int, np.random.Generator], Array]] = {
    "diurnal": diurnal,
    "bursts": bursts,
    "steps": steps,
    "timers": timers,
    "recurring": recurring,
}
