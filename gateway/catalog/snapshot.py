"""What a gateway knows about models right now: the repository joined with the workers' records. Immutable snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millstream.services.errors import not_found
from millstream.services.model.manifest import Manifest
from millstream.services.model.names import NAME_CHARACTERS_MAX
from millstream.services.repository.verdicts import NO_VERDICT, Verdict
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord

#: digits of millstream.services.model.names.VERSION_MAX; converting a number of any length would cost the square of it
_DIGITS_MAX = 10


def shown(name: str) -> str:
    """A caller's name as it may stand in a message: no model has a longer one."""
    return name if len(name) <= NAME_CHARACTERS_MAX else f"{name[:NAME_CHARACTERS_MAX]}…"


def version_number(model: str, text: str) -> int:
    """The version in a path. Raises Failure(NOT_FOUND): without digits the path does not exist, as in the v2 reference."""
    if not (text.isascii() and text.isdigit()):
        raise not_found("Not Found")
    digits = text.lstrip("0") or "0"
    if len(digits) > _DIGITS_MAX:
        raise not_found(f"Request for unknown model: '{shown(model)}' version {digits[:_DIGITS_MAX]}… is not found")
    return int(digits)


@dataclass(frozen=True, slots=True)
class Replica:
    """An instance and the worker that holds it."""

    worker: WorkerRecord
    instance: InstanceRecord


@dataclass(frozen=True, slots=True)
class VersionView:
    """A published version and its instances. `state` is the best instance's; PENDING while no worker has it.

    UNLOADED: nobody is to serve it, though instances may still be on their way out. FAILED also when `verdict`, what
    running it has shown, keeps workers from loading it.
    """

    manifest: Manifest
    state: State
    reason: str | None  # why it is FAILED
    placed: tuple[Replica, ...]
    verdict: Verdict = NO_VERDICT

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    @property
    def loaded(self) -> bool:
        return self.state is not State.UNLOADED


@dataclass(frozen=True, slots=True)
class ModelView:
    """`active`: the version asked for; `serving`: the one that answers requests that name no version.

    `source`: the folder that it is served from in place. `failure`: why its last load failed. `unloaded`: it does not
    answer until it is loaded.
    """

    name: str
    active: int | None
    serving: int | None
    versions: Mapping[int, VersionView]
    source: str | None = None
    failure: str = ""
    unloaded: bool = False

    def published(self, version: int) -> VersionView:
        """A version, loaded or not. Raises Failure(NOT_FOUND)."""
        view = self.versions.get(version)
        if view is None:
            raise not_found(f"Request for unknown model: '{self.name}' version {version} is not found")
        return view

    def version(self, version: int | None) -> VersionView:
        """The version that takes a request. Raises Failure(NOT_FOUND) with the v2 reference's wording."""
        number = self.serving if version is None else version
        view = None if number is None else self.versions.get(number)
        if view is None or not view.loaded:
            if version is None and self.unloaded:
                raise not_found(f"Request for unknown model: '{self.name}' is not found: it is unloaded")
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
            raise not_found(f"Request for unknown model: '{shown(name)}' is not found")
        return view
