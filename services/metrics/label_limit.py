"""Bounds the label `model`: the busiest models have series of their own on the page, all others share `other`.

totals of all processes ─> fold(totals, Shares) ─> totals of the page
once a minute: requests of each model ─> choose ─> the next Shares

The metric files keep every model's counts. What the page shows is derived from them, so that it is the same whichever
process answers a scrape:
    a model with its own series: own series = value - base, and `base` counts under `other`
    any other model:             value - own counts under `other`, and `own` is what its own series last showed
`base` and `own` change only when a model gets or loses its series, to the values at which neither sum moves. So no
counter ever falls, a series continues where it stopped, and the sum over all models is the sum of the files. The series
of a version that was deleted leave the page; what it counted under `other` stays there, as `ended`. Sums of
seconds are cut to multiples of 2^-26 s: their sums and differences are exact then, and no rounding looks like a fall.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from math import floor
from operator import add, sub
from typing import Any, NamedTuple

from millstream.services.metrics import inference
from millstream.services.metrics.catalogue import CATALOGUE, REQUESTS, Kind
from millstream.services.metrics.record import OTHER, Key, Totals

#: interval at which the busiest models are chosen again
CHOOSE_S = 60.0
#: The requests of an earlier interval count half of those of the next.
_DECAY = 0.5
#: A model takes the series of another if it is this many times as busy, so that models of one rate do not alternate.
_KEEP = 1.5
_INSTANCE_LABELS = ("model", "version", "content_id")  # which name what a series is about: all are `other` together
_OF_MODELS = {
    metric.name: sum(label in _INSTANCE_LABELS for label in metric.labels)
    for metric in (*CATALOGUE, inference.REQUESTS, inference.RUNS, inference.LAST, inference.PENDING)
    if metric.labels[:1] == ("model",)
}

_Values = list[float]
#: whether a version of a model exists; version None: whether the model does
Exists = Callable[[str, str | None], bool]
#: Multiples of 1 / _UNIT below 2^27 are exact in a float64, and so are their sums and differences.
_UNIT = float(1 << 26)


class Activity(NamedTuple):
    """How busy a model is: its requests at the last choice, and a decaying sum of those in each interval."""

    requests: float
    score: float


@dataclass(frozen=True, slots=True)
class Shares:
    """Which models have their own series, and how the counts are divided between these and `other`."""

    at: float = 0.0  # when they were chosen, in seconds since the epoch
    shown: frozenset[str] = frozenset()
    activity: Mapping[str, Activity] = field(default_factory=dict)
    base: Mapping[Key, _Values] = field(default_factory=dict)
    own: Mapping[Key, _Values] = field(default_factory=dict)
    ended: Mapping[Key, _Values] = field(default_factory=dict)  # by key of `other`

    def document(self) -> dict[str, Any]:
        """Return the shares in JSON form."""
        return {
            "at": self.at,
            "shown": sorted(self.shown),
            "activity": self.activity,
            "base": _rows(self.base),
            "own": _rows(self.own),
            "ended": _rows(self.ended),
        }

    @classmethod
    def parse(cls, document: Any) -> Shares:
        """Return the shares from their JSON form. Raises ValueError, KeyError, TypeError or AttributeError."""
        return cls(
            float(document["at"]),
            frozenset(document["shown"]),
            {model: Activity(*pair) for model, pair in document["activity"].items()},
            _values(document["base"]),
            _values(document["own"]),
            _values(document.get("ended", ())),  # an earlier release has none
        )


def is_of_model(key: Key) -> bool:
    """Return whether a series is about one model, which its first label names."""
    return is_about_model(key.name, key.labels)


def is_about_model(name: str, labels: tuple[str, ...]) -> bool:
    """Return whether the series of this name with these labels is about one model."""
    return name in _OF_MODELS and bool(labels) and labels[0] != OTHER


def all_exist(_model: str, _version: str | None) -> bool:
    """Say that no version was deleted."""
    return True


def subject(name: str, labels: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the model of a series and its version, None for a series of the whole model."""
    return labels[0], labels[1] if _OF_MODELS[name] > 1 else None


def existing(totals: Totals, exists: Exists) -> Totals:
    """Return the totals without the series of versions and models that were deleted."""
    found = Totals()
    for key, values in totals.items():
        if not is_of_model(key) or exists(*subject(key.name, key.labels)):
            found[key] = values
    return found


def models_of(totals: Iterable[Key]) -> set[str]:
    """Return the names of all models that have series."""
    return {key.labels[0] for key in totals if is_of_model(key)}


def other_labels(name: str, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels under which a model without its own series counts: pool, protocol and outcome stay."""
    count = _OF_MODELS[name]
    return (OTHER,) * count + labels[count:]


def exact(totals: Totals) -> Totals:
    """Return the totals with the counts of models cut so that `fold` and `choose` calculate without rounding."""
    found = Totals()
    for key, values in totals.items():
        found[key] = _cut(key.kind, values) if is_of_model(key) else values
    return found


def _cut(kind: Kind, values: _Values) -> _Values:
    if kind is Kind.HISTOGRAM:  # only the sum of its observations is no whole number
        return [*values[:-1], floor(values[-1] * _UNIT) / _UNIT]
    return [floor(value * _UNIT) / _UNIT for value in values] if kind in {Kind.COUNTER, Kind.VECTOR} else values


def fold(totals: Totals, shares: Shares, exists: Exists = all_exist) -> Totals:
    """Return what the page shows of `totals`, which are `exact`."""
    folded = Totals()
    for key, values in shares.ended.items():
        _add(folded, key, values)
    for key, values in totals.items():
        if not is_of_model(key):
            _add(folded, key, values)
            continue
        other = Key(key.kind, key.name, other_labels(key.name, key.labels), key.slots)
        if key.labels[0] in shares.shown:
            base = _known(shares.base, key, values)
            if base is not None:
                _add(folded, other, base)
            if exists(*subject(key.name, key.labels)):
                _add(folded, key, values if base is None else list(map(sub, values, base)))
        else:
            own = _known(shares.own, key, values)
            if _is_count(key) or exists(*subject(key.name, key.labels)):
                _add(folded, other, values if own is None else list(map(sub, values, own)))
    return folded


def choose(totals: Totals, before: Shares | None, models_max: int, now: float, exists: Exists = all_exist) -> Shares:
    """Return the shares from now on. `totals` are `exact`.

    `before` None: every model had its own series until now. What they showed counts under `other` from now on, which
    begins with it.
    """
    activity = _activity(totals, before, now)
    models = {model for model in models_of(totals) if exists(model, None)}
    shown_before = before.shown if before is not None else frozenset()

    def rank(model: str) -> tuple[float, bool, str]:
        kept = model in shown_before
        return -activity[model].score * (_KEEP if kept else 1.0), not kept, model

    shown = frozenset(nsmallest(models_max, models, rank))
    base: dict[Key, _Values] = {}
    own: dict[Key, _Values] = {}
    ended = Totals() if before is None else Totals(before.ended)
    for key, values in totals.items():
        if not (is_of_model(key) and _is_count(key)):
            continue
        if not exists(*subject(key.name, key.labels)):
            if before is not None:
                _end(ended, key, values, before)
            if key.labels[0] not in shown:
                own[key] = list(values)
            continue
        if before is None:
            continue
        was_shown, is_shown = key.labels[0] in shown_before, key.labels[0] in shown
        share = _known(before.base if was_shown else before.own, key, values)
        if was_shown != is_shown:
            share = values if share is None else list(map(sub, values, share))
        if share is not None and any(share):
            (base if is_shown else own)[key] = list(share)
    return Shares(now, shown, activity, base, own, ended)


def _end(ended: Totals, key: Key, values: _Values, before: Shares) -> None:
    """Add what a series of a deleted version counted under `other`, where it no longer counts from now on."""
    other = Key(key.kind, key.name, other_labels(key.name, key.labels), key.slots)
    if key.labels[0] in before.shown:
        share = _known(before.base, key, values)
    else:
        own = _known(before.own, key, values)
        share = values if own is None else list(map(sub, values, own))
    if share is not None and any(share):
        _add(ended, other, share)


def _activity(totals: Totals, before: Shares | None, now: float) -> dict[str, Activity]:
    """Return the requests of each model so far, and its score."""
    requests: Counter[str] = Counter()
    for key, values in totals.items():
        if key.name == REQUESTS.name and is_of_model(key):
            requests[key.labels[0]] += values[0]  # type: ignore[assignment]
    past = before.activity if before is not None else {}
    decay = _DECAY ** (max(0.0, now - before.at) / CHOOSE_S) if before is not None else 0.0
    found = {}
    for model in models_of(totals):
        count = float(requests[model])
        known = past.get(model, Activity(0.0, 0.0))
        found[model] = Activity(count, known.score * decay + max(0.0, count - known.requests))
    return found


def _is_count(key: Key) -> bool:
    return key.kind.lasting and key.kind is not Kind.LATEST


def _known(shares: Mapping[Key, _Values], key: Key, values: _Values) -> _Values | None:
    """Return the share of a series; None if it has none, or if the counts began again from 0 since."""
    share = shares.get(key)
    if share is None or any(map(float.__gt__, share, values)):
        return None
    return share


def _add(folded: Totals, key: Key, values: _Values) -> None:
    known = folded.get(key)
    if known is None:
        folded[key] = list(values)
    else:
        folded[key] = list(map(max if key.kind is Kind.LATEST else add, known, values))


def _rows(shares: Mapping[Key, _Values]) -> list[Any]:
    return [[key.kind, key.name, key.labels, values] for key, values in shares.items()]


def _values(rows: Collection[Any]) -> dict[Key, _Values]:
    found = {}
    for kind, name, labels, values in rows:
        floats = [float(value) for value in values]
        found[Key(Kind(kind), name, tuple(labels), len(floats))] = floats
    return found
