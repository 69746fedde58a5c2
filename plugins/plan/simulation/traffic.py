"""The calls of a simulation: read from a table, or made up from a seed, like those of Azure Functions in 2019. Pure.

The made-up trace is MAF-like, no more: it follows the published statistics of "Serverless in the Wild" (Shahrad et al.,
USENIX ATC 2020), not the trace itself, which is not free to be shipped here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Decimal logarithm of the calls a second of a model: normal, so that 45 % are called at most once an hour and 81 % at
#: most once a minute, as in the paper; over eight orders of magnitude.
LOG_RATE_MEAN, LOG_RATE_SIGMA = -3.33, 1.77
#: The hottest models are cut off here: they are hits in every policy, and would be all that is simulated.
RATE_MAX = 0.2
TIMER_SHARE, BURSTY_SHARE = 0.3, 0.25  # of the models; the others are Poisson
TIMER_RATE_MAX = 1 / 45  # a faster model has no timer
PERIODS_S = (60.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, 7200.0, 14_400.0, 21_600.0, 43_200.0, 86_400.0)
JITTER_S = 2.0  # of timers, standard deviation
BURSTY_CV = (4.0, 8.0)  # coefficient of variation of the gaps of bursty models (Gamma)
DAY_S = 86_400.0
WAVE_FLOOR = 0.5  # rate in the middle of the night, as a share of the rate at noon


@dataclass(frozen=True, slots=True)
class Trace:
    """Calls in the order of time.

    Args:
        seconds: instants of the calls, from 0 on.
        models: index of the called model, for each call.
        end_s: the end of the trace.
    """

    seconds: npt.NDArray[np.float64]
    models: npt.NDArray[np.int32]
    end_s: float

    def __len__(self) -> int:
        return len(self.seconds)


def generated_trace(models: int, hours: float, seed: int, rate_max: float = RATE_MAX) -> Trace:
    """Return a MAF-like trace of calls to `models` models; equal for equal arguments."""
    random = np.random.default_rng([seed, 2])
    end_s = hours * 3600.0
    rates = np.minimum(rate_max, 10 ** (LOG_RATE_MEAN + LOG_RATE_SIGMA * random.standard_normal(models)))
    kinds = random.random(models)
    wave = _Wave(end_s)
    calls = []
    for rate, kind in zip(rates.tolist(), kinds.tolist(), strict=True):
        if kind < TIMER_SHARE and rate <= TIMER_RATE_MAX:
            calls.append(_timer(random, rate, end_s))
        elif kind < TIMER_SHARE + BURSTY_SHARE:
            calls.append(wave.warped(_gamma(random, rate, random.uniform(*BURSTY_CV), wave.total_s)))
        else:
            calls.append(wave.warped(_gamma(random, rate, 1.0, wave.total_s)))
    return _merged(calls, end_s)


def read_trace(rows: Iterable[Mapping[str, str]], names: Sequence[str]) -> Trace:
    """Return the trace of a table. Raises ValueError, which names the row.

    Args:
        rows: `model` and `seconds` of each call, in any order.
        names: the names of the models.
    """
    index = {name: at for at, name in enumerate(names)}
    seconds, models = [], []
    for at, row in enumerate(rows, 1):
        name, instant = str(row.get("model") or ""), row.get("seconds")
        if name not in index:
            raise ValueError(f"row {at}: there is no model {name[:64]!r} among the models")
        try:
            second = float(instant or "")
        except (TypeError, ValueError):
            raise ValueError(f"row {at}: seconds is {str(instant)[:64]!r}, which is no number") from None
        if not 0 <= second < 1e10:
            raise ValueError(f"row {at}: seconds is {second:g}; instants are counted from 0")
        seconds.append(second)
        models.append(index[name])
    if not seconds:
        raise ValueError("there is no call in it")
    return sorted_trace(seconds, models)


def sorted_trace(seconds: Sequence[float], models: Sequence[int]) -> Trace:
    """Return the trace of calls in any order, of which there is one at least."""
    order = np.argsort(np.array(seconds), kind="stable")
    instants = np.array(seconds)[order]
    return Trace(instants, np.array(models, np.int32)[order], float(instants[-1]))


class _Wave:
    """The daily wave: maps time in which calls come evenly to time in which they come by day more than by night."""

    def __init__(self, end_s: float) -> None:
        self._at_s = np.linspace(0.0, end_s, max(2, int(end_s / 60.0)))
        level = (1 + WAVE_FLOOR) / 2 - (1 - WAVE_FLOOR) / 2 * np.cos(2 * np.pi * self._at_s / DAY_S)
        level /= level.mean()
        steps = np.diff(self._at_s) * (level[1:] + level[:-1]) / 2
        self._even_s = np.concatenate([[0.0], np.cumsum(steps)])
        self.total_s = float(self._even_s[-1])

    def warped(self, even_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.interp(even_s, self._even_s, self._at_s)


def _timer(random: np.random.Generator, rate: float, end_s: float) -> npt.NDArray[np.float64]:
    """Return the calls of a timer with the usual period that is nearest to the rate's."""
    period_s = min(PERIODS_S, key=lambda period_s: abs(np.log(period_s * rate)))
    at_s = np.arange(random.uniform(0, period_s), end_s, period_s)
    return np.clip(at_s + JITTER_S * random.standard_normal(len(at_s)), 0.0, end_s)


def _gamma(random: np.random.Generator, rate: float, cv: float, end_s: float) -> npt.NDArray[np.float64]:
    """Return calls whose gaps are Gamma-distributed with this coefficient of variation; 1 is Poisson."""
    shape = 1 / cv**2
    calls: list[npt.NDArray[np.float64]] = []
    # A process that has run for ever: it begins anywhere in a gap.
    begin_s = -random.uniform(0, 1) * random.gamma(shape, 1 / (rate * shape)) if cv > 1 else 0.0
    while begin_s < end_s:
        number = int(1.2 * rate * end_s) + 16
        at_s = begin_s + np.cumsum(random.gamma(shape, 1 / (rate * shape), number))
        calls.append(at_s[(at_s >= 0) & (at_s < end_s)])
        begin_s = float(at_s[-1])
    return np.concatenate(calls)


def _merged(calls: Sequence[npt.NDArray[np.float64]], end_s: float) -> Trace:
    seconds = np.concatenate(calls) if calls else np.zeros(0)
    models = np.repeat(np.arange(len(calls), dtype=np.int32), [len(one) for one in calls])
    order = np.argsort(seconds, kind="stable")
    return Trace(seconds[order], models[order], end_s)
