"""The models as a gateway knows them: the repository joined with the workers' records. Immutable.

SnapshotCell and ScaleView are what is replaced: they are made before all that reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from millstream.gateway.access.principal import CALLER, shown
from millstream.services.access.scopes import Need
from millstream.services.errors import Failure, Subject, not_found
from millstream.services.model.manifest import EndpointPlacement, Manifest
from millstream.services.model.names import NAME_CHARACTERS_MAX
from millstream.services.nearest_names import did_you_mean
from millstream.services.placement.pools import POOL_DEFAULT, PoolTraits
from millstream.services.repository.verdicts import NO_VERDICT, Verdict
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord

#: digits of services.model.names.VERSION_MAX; longer numbers are not converted, which would take quadratic time
_DIGITS_MAX = 10
VERSIONS_SHOWN_MAX = 8  # in a message


def name_excerpt(name: str) -> str:
    """Return a caller's name for use in a message, cut to the length that a model's name may have."""
    return name if len(name) <= NAME_CHARACTERS_MAX else f"{name[:NAME_CHARACTERS_MAX]}…"


def versions_text(numbers: Collection[int]) -> str:
    """Return "it has versions 3, 2 and 1" for the end of a message: at most VERSIONS_SHOWN_MAX, and how many more."""
    newest = [str(number) for number in sorted(numbers, reverse=True)[:VERSIONS_SHOWN_MAX]]
    if len(newest) < 2:
        return f"it has version {newest[0]}" if newest else "it has no version"
    if len(numbers) > VERSIONS_SHOWN_MAX:
        return f"it has versions {', '.join(newest)} and {len(numbers) - VERSIONS_SHOWN_MAX} more"
    return f"it has versions {', '.join(newest[:-1])} and {newest[-1]}"


def version_number(model: str, text: str) -> int:
    """Return the version in a path.

    Raises:
        Failure: NOT_FOUND, also for text that is not a number: the v2 reference has no such path.
    """
    if not (text.isascii() and text.isdigit()):
        raise not_found(f"Not Found; a version is a whole number, not '{name_excerpt(text)}'")
    digits = text.lstrip("0") or "0"
    if len(digits) > _DIGITS_MAX:
        raise not_found(
            f"Request for unknown model: '{name_excerpt(model)}' version {digits[:_DIGITS_MAX]}… is not found",
            Subject.VERSION,
        )
    return int(digits)


_ON_DEMAND = frozenset({State.STANDBY, State.LOADING, State.WARMING, State.DRAINING})


@dataclass(frozen=True, slots=True)
class Replica:
    """An instance of a version, and its worker."""

    worker: WorkerRecord
    instance: InstanceRecord


@dataclass(frozen=True, slots=True)
class VersionView:
    """A published version and its instances.

    Its state is that of its best instance. While no worker has it, it is PENDING, and STANDBY as soon as workers know
    it. It is UNLOADED if no worker is meant to serve it, even while some still unload it. It is FAILED also if its
    verdict keeps workers from loading it.
    """

    manifest: Manifest
    state: State
    reason: str | None  # why it is FAILED
    replicas: tuple[Replica, ...]
    verdict: Verdict = NO_VERDICT  # findings from running the version
    pools: tuple[str, ...] = (POOL_DEFAULT,)  # those that may serve it, the preferred one first
    on_demand: bool = False  # it was on standby: what loads it is a call, which waits for it

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    @property
    def available(self) -> bool:
        """Whether a call is answered: it is ready, or a call makes a worker load it."""
        return self.ready or (self.on_demand and self.state in _ON_DEMAND)

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
    placement: EndpointPlacement = field(default_factory=EndpointPlacement)

    def published(self, version: int) -> VersionView:
        """Return a version, loaded or not. Raises Failure(NOT_FOUND)."""
        view = self.versions.get(version)
        if view is None:
            raise self.unknown_version(version, self.versions)
        return view

    def version(self, version: int | None) -> VersionView:
        """Return the version that answers a request. Raises Failure(NOT_FOUND) with the v2 reference's wording."""
        number = self.serving if version is None else version
        view = None if number is None else self.versions.get(number)
        if view is None or not view.loaded:
            if version is None and self.unloaded:
                raise not_found(f"Request for unknown model: '{self.name}' is not found: it is unloaded", Subject.MODEL)
            if version is None:
                raise not_found(
                    f"Request for unknown model: '{self.name}' has no active version{self.loaded_versions}",
                    Subject.VERSION,
                )
            raise self.unknown_version(version, self._loaded())
        return view

    @property
    def loaded_versions(self) -> str:
        """The loaded versions, for the end of a message: "; it has versions 2 and 1"."""
        return f"; {versions_text(self._loaded())}"

    def unknown_version(self, version: int, known: Collection[int]) -> Failure:
        """Return the failure for a version that does not exist, with the `known` ones."""
        return not_found(
            f"Request for unknown model: '{self.name}' version {version} is not found; {versions_text(known)}",
            Subject.VERSION,
        )

    def _loaded(self) -> list[int]:
        return [number for number, view in self.versions.items() if view.loaded]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All models by name and all live workers, as of one refresh of the catalog."""

    models: Mapping[str, ModelView]
    workers: tuple[WorkerRecord, ...]
    pools: Mapping[str, PoolTraits] = field(default_factory=dict)  # all that have, or had, a worker

    def model(self, name: str) -> ModelView:
        """Return a model. Raises Failure(NOT_FOUND)."""
        view = self.models.get(name)
        if view is None:
            raise not_found(
                f"Request for unknown model: '{name_excerpt(name)}' is not found{self.did_you_mean(name)}",
                Subject.MODEL,
            )
        return view

    def exists(self, name: str, version: str | None) -> bool:
        """Return whether there is a model of this name, and a version of this number; None: any."""
        model = self.models.get(name)
        return model is not None and (version is None or not version.isdecimal() or int(version) in model.versions)

    def placement(self, name: str) -> EndpointPlacement:
        """Return where and how often a model is loaded; the default for one that is not in the snapshot."""
        view = self.models.get(name)
        return view.placement if view is not None else EndpointPlacement()

    def did_you_mean(self, name: str) -> str:
        """Return the nearest names for the end of a message: "; did you mean 'a'?"; "" if there is none.

        Only models that answer requests are named, and of these only such as the caller may know of.
        """
        return did_you_mean(name, shown(known for known, view in self.models.items() if view.serving is not None))


def visible(snapshot: Snapshot, need: Need = Need.DESCRIBE) -> Snapshot:
    """Return what a list for the caller of the current task may show: of workers, the instances of these models."""
    principal = CALLER.get()
    if principal is None or principal.sees_all(need):
        return snapshot
    known = frozenset(shown(snapshot.models, need))

    def seen(worker: WorkerRecord) -> WorkerRecord:
        instances = tuple(one for one in worker.instances if principal.grants.allows(need, one.model))
        return worker.model_copy(update={"instances": instances})

    models = {name: view for name, view in snapshot.models.items() if name in known}
    return replace(snapshot, models=models, workers=tuple(map(seen, snapshot.workers)))


class SnapshotCell:
    """Has the current snapshot, which the catalog replaces."""

    def __init__(self) -> None:
        self.current = Snapshot({}, ())

    def get(self) -> Snapshot:
        return self.current


class ScaleView:
    """What a gateway knows of pools whose number of workers follows their load: nothing, until a plug-in says it."""

    def __init__(self) -> None:
        self._starts: Mapping[str, float] = {}
        self._to_zero: frozenset[str] = frozenset()

    def set(self, starts: Mapping[str, float], to_zero: frozenset[str]) -> None:
        """Replace what is known.

        Args:
            starts: seconds until a pool without workers has one that is started for a request, by pool.
            to_zero: those that need no worker until their first request.
        """
        self._starts, self._to_zero = starts, to_zero

    def asleep(self, staffed: Collection[str]) -> frozenset[str]:
        """Return the pools without workers that need none until their first request. `staffed`: those with workers."""
        return self._to_zero.difference(staffed)

    def start_s(self, pool: str) -> float:
        """Return the seconds until a pool without workers has one that is started for a request; 0: none is."""
        return self._starts.get(pool, 0.0)
