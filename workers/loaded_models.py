"""What a worker holds: versions and their instances, shared between the keeper (writes) and the main loop (reads).

Every change replaces a whole immutable value in one dict assignment, so the main loop reads without a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from millstream.services.model.manifest import Manifest
from millstream.services.wire.records import InstanceRecord, State
from millstream.workers.backends.base import Instance
from millstream.workers.exploration import Exploration


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A version in this worker. `instance` is there from READY on."""

    manifest: Manifest
    state: State
    reason: str | None = None
    instance: Instance | None = None
    rows_efficient: int = 1  # more in one run gain next to nothing
    rows_fitting: int = 1 << 30  # more found no memory
    measured: dict[int, float] = field(default_factory=dict)  # rows of a run -> seconds; corrected by the main loop
    exploration: Exploration | None = None  # which corrects it
    alone: str = ""  # why requests share no runs, although the version says so; empty: they may

    @property
    def rows_max(self) -> int:
        return self.manifest.config.rows_max if self.manifest.signature.batching else 1

    @property
    def rows_merged_max(self) -> int:
        """Rows up to which batches are run together."""
        return 1 if self.alone else min(self.rows_max, self.rows_efficient)

    def run_s(self, rows: int) -> float:
        """Seconds that a run takes, as measured with this number of rows or the next larger one; 0 if nothing was."""
        larger = [seconds for measured, seconds in self.measured.items() if measured >= rows]
        return min(larger) if larger else max(self.measured.values(), default=0.0)

    def record(self) -> InstanceRecord:
        return InstanceRecord(
            content_id=self.manifest.content_id,
            model=self.manifest.model,
            version=self.manifest.version,
            state=self.state,
            reason=self.reason,
            profile=dict(self.measured),
            rows_max=self.rows_max,
            rows_efficient=self.rows_merged_max,
            size_bytes=self.instance.size_bytes if self.instance is not None else 0,
        )


class LoadedModels:
    """Versions by content id (which is also the lane's name). `on_change` is called after each change."""

    def __init__(self) -> None:
        self._models: dict[str, LoadedModel] = {}
        self._changing = threading.Lock()
        self._records: dict[str, tuple[LoadedModel, InstanceRecord]] = {}  # as they were published last
        self.on_change: Callable[[], None] = lambda: None

    def get(self, content_id: str) -> LoadedModel | None:
        return self._models.get(content_id)

    def all(self) -> dict[str, LoadedModel]:
        return dict(self._models)

    def set(self, model: LoadedModel) -> None:
        with self._changing:
            self._models[model.manifest.content_id] = model
        self.on_change()

    def move(self, content_id: str, state: State, reason: str | None = None) -> None:
        """Change the state of a model."""
        with self._changing:
            self._models[content_id] = replace(self._models[content_id], state=state, reason=reason)
        self.on_change()

    def learn(self, content_id: str, exploration: Exploration | None, rows: int, *, fitting: int | None = None) -> None:
        """From now on `rows` rows run together, if the instance is still the one that `exploration` is of.

        `fitting`: the most that there is memory for, where that was found.
        """
        with self._changing:
            model = self._models.get(content_id)
            if model is None or model.exploration is not exploration:
                return
            limit = model.rows_fitting if fitting is None else min(fitting, model.rows_fitting)
            self._models[content_id] = replace(model, rows_efficient=rows, rows_fitting=limit)
        self.on_change()

    def run_alone(self, content_id: str, reason: str) -> None:
        """From now on requests of a version share no runs, for `reason`; empty: they may again."""
        with self._changing:
            model = self._models.get(content_id)
            if model is None or model.alone == reason:
                return
            self._models[content_id] = replace(model, alone=reason)
        self.on_change()

    def remove(self, content_id: str) -> None:
        with self._changing:
            self._models.pop(content_id, None)
        self.on_change()

    def records(self) -> tuple[InstanceRecord, ...]:
        """What to publish of all of them; of one that did not change, the same object as last time."""
        records: dict[str, tuple[LoadedModel, InstanceRecord]] = {}
        for content_id, model in self.all().items():
            known = self._records.get(content_id)
            if known is None or known[0] is not model or known[1].profile != dict(model.measured):
                known = (model, model.record())
            records[content_id] = known
        self._records = records
        return tuple(record for _, record in records.values())

    def lanes(self) -> list[str]:
        """Content ids that can run now."""
        return [content_id for content_id, model in self.all().items() if model.state is State.READY]
