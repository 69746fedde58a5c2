"""The index of the model repository: every version that is known and its state, in Triton's words. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from millstream.gateway.catalog.snapshot import ModelView, Snapshot, VersionView
from millstream.gateway.triton.interfaces import IndexEntry
from millstream.services.wire.records import State

READY, UNAVAILABLE, LOADING, UNLOADING = "READY", "UNAVAILABLE", "LOADING", "UNLOADING"
_STATES = {State.READY: READY, State.FAILED: UNAVAILABLE}
_ON_THE_WAY = {State.LOADING, State.WARMING}


def entries(snapshot: Snapshot, names: Collection[str], loading: Collection[str]) -> list[IndexEntry]:
    """`names`: models of the folders that are served in place. `loading`: models that a load is under way for."""
    on_trial = {
        (instance.model, instance.version)
        for worker in snapshot.workers
        for instance in worker.instances
        if instance.state in _ON_THE_WAY
    }
    found: list[IndexEntry] = []
    for name in sorted({*snapshot.models, *names, *loading}):
        view = snapshot.models.get(name)
        of_model = list(_of(view, on_trial)) if view is not None else []
        if of_model:
            found += of_model
        elif name in loading:
            found.append(IndexEntry(name, "", LOADING))
        else:
            found.append(IndexEntry(name))
    return found


def _of(model: ModelView, on_trial: Collection[tuple[str, int]]) -> Iterator[IndexEntry]:
    for number, view in sorted(model.versions.items()):
        state, reason = _state(view)
        if state == UNAVAILABLE and (model.name, number) in on_trial:
            state, reason = LOADING, ""
        yield IndexEntry(model.name, str(number), state, reason or model.failure)
    if not model.versions and model.failure:
        yield IndexEntry(model.name, "", UNAVAILABLE, model.failure)


def _state(view: VersionView) -> tuple[str, str]:
    if not view.loaded:
        return (UNLOADING if view.placed else UNAVAILABLE), "unloaded"
    return _STATES.get(view.state, LOADING), view.reason or ""
