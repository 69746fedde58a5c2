"""snapshot: the models as a gateway knows them: the repository joined with the workers' records. Immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millstream.services.errors import Subject, not_found
from millstream.services.model.manifest import Manifest
from millstream.services.model.names import NAME_CHARACTERS_MAX
from millstream.services.repository.verdicts import NO_VERDICT, Verdict
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord

#: digits of services.model.names.VERSION_MAX; longer numbers are not converted, which would take quadratic time
_DIGITS_MAX = 10


def name_excerpt(name: str) -> str:
    """Return a caller's name for use in a message, cut to the length that a model's name may have."""
    return name if len(name) <= NAME_CHARACTERS_MAX else f"{name[:NAME_CHARACTERS_MAX]}…"


def version_number(model: str, text: str) -> int:
    """Return the version in a path.

    Raises:
        Failure: NOT_FOUND, also for text that is not a number: the v2 reference has no such path.
    """
    if not (text.isascii() and text.isdigit()):
        raise not_found("Not Found")
    digits = text.lstrip("0") or "0"
    if len(digits) > _DIGITS_MAX:
        raise not_found(
            f"Request for unknown model: '{name_excerpt(model)}' version {digits[:_DIGITS_MAX]}… is not found",
            Subject.VERSION,
        )
    return int(digits)


@dataclass(frozen=True, slots=True)
class Replica:
    """An instance of a version, and its worker."""

    worker: WorkerRecord
    instance: InstanceRecord


@dataclass(frozen=True, slots=True)
class VersionView:
    """A published version and its instances.

    Its state is that of its best instance, or PENDING while no worker has it. It is UNLOADED if no worker is meant to
    serve it, even while some still unload it. It is FAILED also if its verdict keeps workers from loading it.
    """

    manifest: Manifest
    state: State
    reason: str | None  # why it is FAILED
    replicas: tuple[Replica, ...]
    verdict: Verdict = NO_VERDICT  # findings from running the version

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    @property
    def loaded(self) -> bool:
        return self.state is not State.UNLOADED


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model and its versions."""

    name: str
    active: int | None  # the activated version
    serving: int | None  # the version that answers requests without a version
    versions: Mapping[int, VersionView]
    source: str | None = None  # the folder from which it is served in place
    failure: str = ""  # why its last load failed
    unloaded: bool = False  # it answers no request until it is loaded

    def published(self, version: int) -> VersionView:
        """Return a version, loaded or not. Raises Failure(NOT_FOUND)."""
        view = self.versions.get(version)
        if view is None:
            raise not_found(f"Request for unknown model: '{self.name}' version {version} is not found", Subject.VERSION)
        return view

    def version(self, version: int | None) -> VersionView:
        """Return the version that answers a request. Raises Failure(NOT_FOUND) with the v2 reference's wording."""
        number = self.serving if version is None else version
        view = None if number is None else self.versions.get(number)
        if view is None or not view.loaded:
            if version is None and self.unloaded:
                raise not_found(f"Request for unknown model: '{self.name}' is not found: it is unloaded", Subject.MODEL)
            if version is None:
                raise not_found(f"Request for unknown model: '{self.name}' has no active version", Subject.VERSION)
            raise not_found(f"Request for unknown model: '{self.name}' version {version} is not found", Subject.VERSION)
        return view


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All models by name and all live workers, as of one refresh of the catalog."""

    models: Mapping[str, ModelView]
    workers: tuple[WorkerRecord, ...]

    def model(self, name: str) -> ModelView:
        """Return a model. Raises Failure(NOT_FOUND)."""
        view = self.models.get(name)
        if view is None:
            raise not_found(f"Request for unknown model: '{name_excerpt(name)}' is not found", Subject.MODEL)
        return view
