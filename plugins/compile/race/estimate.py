"""What earlier races say of a candidate before it is compiled: how long that takes, and what it may gain. Pure.

reports of earlier races ─> Trial, one a row that was compiled or tried ─> Estimate of each candidate, for one model
Candidates enter in the order of their expected gain for each second, so that a short budget is not spent on
compilations that it does not hold, or that gained nothing before. On a new machine the order is that of PRIORS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from millstream.plugins.compile.candidate import Candidate

TRIALS_USED = 5  # of one candidate, or of one target: those with models of the most similar size
#: Compile seconds grow with this power of the model's size: they have a constant part, the start of the libraries.
SIZE_EXPONENT = 0.5
SIZE_FACTOR_MAX = 8.0  # by which seconds of a model of another size are scaled at most
LATE_FACTOR = 2.0  # a compilation that was ended for its time takes so many times as long, for all that is known
GAIN_UNKNOWN = 1.0  # of a target that was never measured: new ones are worth a try. 1: twice as fast
SECONDS_UNKNOWN = 5.0  # of its compilation
GAIN_LEAST = 0.02  # so that cheap candidates come before expensive ones where none is expected to gain
ENTRY_S = 2.0  # beside the compilation: the load, and the first rounds


class Estimate(BaseModel):
    """What is expected of a candidate.

    Args:
        seconds: of its compilation; 0: it is compiled already.
        gain: times as fast as the baseline, less 1.
        trials: how many earlier trials say so; 0: none does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float = Field(SECONDS_UNKNOWN, ge=0, allow_inf_nan=False)
    gain: float = Field(GAIN_UNKNOWN, ge=0, allow_inf_nan=False)
    trials: int = Field(0, ge=0)

    @property
    def density(self) -> float:
        """The expected gain for each second that the candidate takes of the budget."""
        return (self.gain + GAIN_LEAST) / (self.seconds + ENTRY_S)


UNKNOWN = Estimate()
#: Of targets that no earlier race tried: what they took and gained in the races of docs/compilers.md.
PRIORS = {
    "onnxruntime": Estimate(seconds=0.0, gain=0.05),
    "openvino": Estimate(seconds=0.2, gain=0.3),
    "openvino-bf16": Estimate(seconds=0.2, gain=1.0),
    "openvino-int8": Estimate(seconds=5.0, gain=1.5),
    "openvino-int8-dynamic": Estimate(seconds=2.0, gain=0.5),
    "onnxruntime-int8-static": Estimate(seconds=5.0, gain=0.8),
    "onnxruntime-int8-dynamic": Estimate(seconds=2.0, gain=0.3),
    "xla": Estimate(seconds=0.0, gain=0.1),
    "iree": Estimate(seconds=5.0, gain=0.1),
    "aotinductor": Estimate(seconds=20.0, gain=0.3),
    "tvm": Estimate(seconds=20.0, gain=0.0),
}


class Trial(Protocol):
    """A row of an earlier report, as `plugins/compile/stored/race_parts.py` keeps it."""

    @property
    def target(self) -> str: ...

    @property
    def candidate(self) -> str: ...

    @property
    def model_bytes(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def late(self) -> bool: ...

    @property
    def gain(self) -> float | None: ...


class _Similar(NamedTuple):
    trial: Trial
    distance: float  # between the sizes of the models, as a logarithm
    factor: float  # of its seconds, for the other size


def estimates_from(trials: Iterable[Trial], model_bytes: int) -> dict[str, Estimate]:
    """Return what trials say of a model with files of `model_bytes`, by the keys of candidates and names of targets.

    Seconds are the median of the trials with models of the most similar size, scaled by the size. The gain is their
    mean: a candidate that failed or whose answers were wrong gained nothing; of one that was late, that is not known.
    """
    by_name: dict[str, list[_Similar]] = {}
    for trial in trials:
        similar = _similar(trial, model_bytes)
        for name in {trial.candidate, trial.target}:
            by_name.setdefault(name, []).append(similar)
    return {name: _estimate(found) for name, found in by_name.items()}


def estimate_of(candidate: Candidate, known: Mapping[str, Estimate]) -> Estimate:
    """Return the estimate of a candidate, else one from those of its target, else what such targets are known for.

    The gain of its siblings says less of a candidate than its own: it counts half, the prior the other half.
    """
    prior = PRIORS.get(candidate.target, UNKNOWN)
    found = known.get(candidate.key)
    if found is not None:
        return found
    of_target = known.get(candidate.target)
    if of_target is None:
        return prior
    return of_target.model_copy(update={"gain": (of_target.gain + prior.gain) / 2})


def by_promise(candidates: Sequence[Candidate], known: Mapping[str, Estimate]) -> list[Candidate]:
    """Return candidates in the order of their expected gain for each second; equal ones stay in their order."""
    return sorted(candidates, key=lambda one: -estimate_of(one, known).density)


def _similar(trial: Trial, model_bytes: int) -> _Similar:
    if trial.model_bytes <= 0 or model_bytes <= 0:
        return _Similar(trial, math.inf, 1.0)
    times = model_bytes / trial.model_bytes
    factor = times**SIZE_EXPONENT
    return _Similar(trial, abs(math.log(times)), min(SIZE_FACTOR_MAX, max(1 / SIZE_FACTOR_MAX, factor)))


def _estimate(found: Sequence[_Similar]) -> Estimate:
    used = sorted(found, key=lambda one: one.distance)[:TRIALS_USED]
    seconds = sorted(map(_seconds, used))
    gains = [_gain(one.trial) for one in used]
    return Estimate(seconds=seconds[len(seconds) // 2], gain=sum(gains) / len(gains), trials=len(used))


def _seconds(one: _Similar) -> float:
    seconds = one.trial.seconds * one.factor
    # its limit may have been far too short, as at the end of a budget
    return max(LATE_FACTOR * seconds, _prior(one.trial).seconds) if one.trial.late else seconds


def _gain(trial: Trial) -> float:
    return _prior(trial).gain if trial.gain is None else trial.gain


def _prior(trial: Trial) -> Estimate:
    return PRIORS.get(trial.target, UNKNOWN)
