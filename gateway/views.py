"""What a gateway knows about models right now: the repository joined with the workers' records. Immutable snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.errors import not_found
from services.manifest import Manifest
from services.records import InstanceRecord, State, WorkerRecord


@dataclass(frozen=True, slots=True)
class Placed:
    """An instance and the worker that holds it."""

    worker: WorkerRecord
    instance: InstanceRecord


@dataclass(frozen=True, slots=True)
class VersionView:
    """A published version and its instances. `state` is the best instance's; UPLOADED while no worker has it."""

    manifest: Manifest
    state: State
    reason: str | None  # why it is FAILED
    placed: tuple[Placed, ...]

    @property
    def ready(self) -> bool:
        return self.state is State.READY


@dataclass(frozen=True, slots=True)
class ModelView:
    """`active`: the version asked for; `serving`: the one that answers requests that name no version."""

    name: str
    active: int | None
    serving: int | None
    versions: Mapping[int, VersionView]

    def version(self, version: int | None) -> VersionView:
        """The version that takes a request. Raises Failure(NOT_FOUND) with the v2 reference's wording."""
        number = self.serving if version is None else version
        view = None if number is None else self.versions.get(number)
        if view is None:
            if version is None:
                raise not_found(f"Request for unknown model: '{self.name}' has no active version")
            raise not_found(f"Request for unknown model: '{self.name}' version {version} is not found")
        return view


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All models by name and all live workers, as of one refresh of the catalog."""

    models: Mapping[str, ModelView]
    workers: tuple[WorkerRecord, ...]

    def model(self, name: str) -> ModelView:
        """Raises Failure(NOT_FOUND)."""
        view = self.models.get(name)
        if view is None:
            raise not_found(f"Request for unknown model: '{name}' is not found")
        return view
