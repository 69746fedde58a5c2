"""What a repository is: folders of immutable versions and small mutable documents. The only durable truth.

Implementations are synchronous (callers in an event loop use a thread) and pass tests/contract/test_repository.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Protocol, Self

from millstream.services.model.manifest import Endpoint, Manifest
from millstream.services.repository.footprints import Footprints
from millstream.services.repository.variants import Variants
from millstream.services.repository.verdicts import Verdict
from millstream.services.repository.version_documents import D, VersionDocuments


class Staging(Protocol):
    """A private folder in which the files of a version are collected. Leaving the `with` block removes it."""

    @property
    def path(self) -> Path:
        """An empty local folder: write `source/…` and `compiled/…` below it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class LoadLock(Protocol):
    """The lock on the loads of a model, until it is released or its process dies."""

    def release(self) -> None: ...


class StagedVersions(Protocol):
    """Versions between the two phases of a commit: workers load them beside the served versions of the model."""

    def lock(self, model: str) -> LoadLock | None:
        """Lock `model` for one load; None while another process has the lock. Aborts what a dead process staged."""

    def models(self) -> Sequence[str]:
        """Return the names of the models that have staged versions, sorted."""

    def of(self, model: str) -> Sequence[Manifest]:
        """Return the staged versions of a model, ascending."""

    def original(self, model: str, version: int) -> Manifest | None:
        """Return the manifest that the version was published with, also if a load has replaced it since."""

    def add_files(self, model: str, staging: Staging) -> Path:
        """Move the files in `staging` to a folder of the model, which stays while a manifest names it as its origin."""

    def stage(self, manifests: Sequence[Manifest]) -> None:
        """Stage `manifests`, all of one model: workers load them beside the versions that they serve."""

    def abort(self, model: str) -> None:
        """Remove all staged versions of a model, and added files that no manifest names."""

    def commit(self, endpoint: Endpoint, manifests: Sequence[Manifest], removed: Sequence[int] = ()) -> Endpoint:
        """Replace the model's versions by `manifests` and its endpoint by `endpoint`, and delete `removed`, at once.

        Raises Failure(CONFLICT) as replace_endpoint does, and Failure(NOT_FOUND) as `check_kept`.
        """

    def check_kept(self, manifests: Sequence[Manifest]) -> None:
        """Raise Failure(NOT_FOUND) if one of `manifests` is neither staged nor published any more: it was deleted."""


class Verdicts(Protocol):
    """What running a version has shown. Kept across restarts; removed with the version, or when it is cleared."""

    def of(self, manifest: Manifest) -> Verdict:
        """Return the verdict about a version; the default Verdict when nothing is known."""

    def change(self, manifest: Manifest, change: Callable[[Verdict], Verdict]) -> Verdict:
        """Replace the verdict by the result of `change` and return it. The repository's token changes with it."""

    def clear(self, manifest: Manifest) -> bool:
        """Remove the verdict, because an operator wants the version tried again. False: there was none."""


class Repository(Protocol):
    """Raises Failure: NOT_FOUND, CONFLICT, STORAGE (no space), INTERNAL (the folder cannot be used)."""

    @property
    def staged(self) -> StagedVersions:
        """The staged versions of all models."""

    @property
    def variants(self) -> Variants:
        """The compiled forms of all versions."""

    @property
    def verdicts(self) -> Verdicts:
        """The verdicts about all versions."""

    @property
    def footprints(self) -> Footprints:
        """What instances of all versions take, measured or predicted."""

    def documents(self, name: str, of: type[D]) -> VersionDocuments[D]:
        """Return the store of a plug-in's documents of versions, which go with their versions."""

    def open_staging(self) -> Staging:
        """Open a staging folder on the same storage as the versions, so that publishing is one rename."""

    def publish(
        self,
        staging: Staging,
        manifest: Manifest,
        *,
        activate: bool = False,
        owner: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the files in `staging` the version that `manifest` names, atomically and durably.

        A full disk leaves no part of the version.

        Args:
            staging: the folder to publish; it is empty afterwards.
            manifest: describes the version.
            activate: make it the active version, too.
            owner: of the model, if this is its first version.
            check: called while no other version can be published; what it raises, this raises.

        Raises:
            Failure: CONFLICT if the version exists: versions are immutable.
        """

    def models(self) -> Sequence[str]:
        """Return the names of the models that have an endpoint or a version, sorted."""

    def versions(self, model: str) -> Sequence[int]:
        """Return the published versions, ascending; empty for an unknown model."""

    def manifest(self, model: str, version: int) -> Manifest:
        """Return the manifest of a published version. Raises Failure(NOT_FOUND)."""

    def local_path(self, model: str, version: int) -> Path:
        """Return a local folder with the version's files. Raises Failure(NOT_FOUND)."""

    def folder_of(self, manifest: Manifest) -> Path:
        """Return the local folder that the paths in a manifest, staged or published, are relative to."""

    def endpoint(self, model: str) -> Endpoint:
        """Return the model's endpoint; generation 0 if none was written yet. Raises Failure(NOT_FOUND)."""

    def replace_endpoint(self, endpoint: Endpoint) -> Endpoint:
        """Write `endpoint` if the stored generation equals `endpoint.generation`; return it one generation higher.

        Raises Failure(CONFLICT) when another process changed it in between: read it again and decide again.
        """

    def delete_version(self, model: str, version: int) -> None:
        """Remove a version, atomically for readers. Raises Failure(NOT_FOUND)."""

    def delete_model(self, model: str, *, if_empty: bool = False) -> None:
        """Remove a model with all its versions; with `if_empty`, only if it has none. Raises Failure(NOT_FOUND)."""

    def next_version(self, model: str) -> int:
        """Return one more than the highest version ever published: deleted numbers are not assigned again."""

    def size_bytes(self, model: str) -> int:
        """Return the bytes of all files of a model, compiled forms included; 0 if it has none."""

    def stamp(self, model: str) -> Hashable:
        """Return a value that changes when anything of the model changes; it may also change without a change."""

    def token(self) -> str:
        """Return a string that changes when anything in the repository changes; cheap to call once a second."""

    def changed_since(self, seen: str, now: str) -> set[str] | None:
        """Return the models that changed between two tokens, and perhaps later ones; None if that is not known."""
