"""index: lists all known versions and their states, in the terms of Triton's repository index. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from millstream.gateway.catalog.snapshot import ModelView, Snapshot, VersionView
from millstream.services.wire.records import State

READY, UNAVAILABLE, LOADING, UNLOADING = "READY", "UNAVAILABLE", "LOADING", "UNLOADING"
_STANDBY = "on standby: its first call loads it"
_BEING_LOADED = {State.LOADING, State.WARMING}


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A version in the index of the model repository, or a model without versions."""

    name: str
    version: str = ""  # "" for a model that was never loaded
    state: str = ""  # READY, UNAVAILABLE, LOADING, UNLOADING; "" for a model that was never loaded
    reason: str = ""


def entries(snapshot: Snapshot, names: Collection[str], loading: Collection[str]) -> list[IndexEntry]:
    """Return the entries of the index.

    Args:
        snapshot: The published versions.
        names: Names of the models in repositories that are served in place, loaded or not.
        loading: Names of the models that are being loaded.
    """
    being_loaded = {
        (instance.model, instance.version)
        for worker in snapshot.workers
        for instance in worker.instances
        if instance.state in _BEING_LOADED
    }
    index: list[IndexEntry] = []
    for name in sorted({*snapshot.models, *names, *loading}):
        view = snapshot.models.get(name)
        of_model = list(_entries_of(view, being_loaded)) if view is not None else []
        if of_model:
            index += of_model
        elif name in loading:
            index.append(IndexEntry(name, "", LOADING))
        else:
            index.append(IndexEntry(name))
    return index


def _entries_of(model: ModelView, being_loaded: Collection[tuple[str, int]]) -> Iterator[IndexEntry]:
    for number, view in sorted(model.versions.items()):
        state, reason = _state(view)
        if state == UNAVAILABLE and (model.name, number) in being_loaded:
            state, reason = LOADING, ""
        yield IndexEntry(model.name, str(number), state, reason or model.failure)
    if not model.versions and model.failure:
        yield IndexEntry(model.name, "", UNAVAILABLE, model.failure)


def _state(view: VersionView) -> tuple[str, str]:
    if not view.loaded:
        return (UNLOADING if view.replicas else UNAVAILABLE), "unloaded"
    if view.available:  # clients of the index send no request to a model that is not READY
        return READY, _STANDBY if view.state is State.STANDBY else view.reason or ""
    return (UNAVAILABLE if view.state is State.FAILED else LOADING), view.reason or ""
