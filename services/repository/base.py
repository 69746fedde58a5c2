"""What a repository is: folders of immutable versions and small mutable documents. The only durable truth.

Implementations are synchronous (callers in an event loop use a thread) and pass tests/contract/test_repository.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Protocol, Self

from millstream.services.model.manifest import Endpoint, Manifest
from millstream.services.repository.verdicts import Verdict


class Staging(Protocol):
    """A private place where an upload gathers before it becomes a version. Leaving the `with` block removes it."""

    @property
    def path(self) -> Path:
        """An empty local folder: write `source/…` and `compiled/…` below it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class Claim(Protocol):
    """The right to load a model, until it is released or its process dies."""

    def release(self) -> None: ...


class Proposals(Protocol):
    """Versions on trial: loaded by workers beside what serves, and then adopted in its place, or withdrawn."""

    def claim(self, model: str) -> Claim | None:
        """The right to load `model`; None while another process has it. Withdraws what a dead owner proposed."""

    def models(self) -> Sequence[str]:
        """Names of the models that have proposals."""

    def of(self, model: str) -> Sequence[Manifest]:
        """The proposed versions of a model, ascending."""

    def uploaded(self, model: str, version: int) -> Manifest | None:
        """The manifest that the version was published with, whatever a load has made of it since."""

    def give(self, model: str, staging: Staging) -> Path:
        """Keep staged files below the model for as long as a manifest names them as its origin."""

    def propose(self, manifests: Sequence[Manifest]) -> None:
        """Have workers load these beside what they serve."""

    def withdraw(self, model: str) -> None:
        """Take all proposals of a model back, and files that no manifest needs."""

    def adopt(self, endpoint: Endpoint, manifests: Sequence[Manifest], dropped: Sequence[int] = ()) -> Endpoint:
        """Make `manifests` the model's versions and `endpoint` its endpoint in one change; `dropped` versions go.

        Raises Failure(CONFLICT) as replace_endpoint does.
        """


class Verdicts(Protocol):
    """What running a version has shown. Kept across restarts; gone with the version, or when it is cleared."""

    def of(self, manifest: Manifest) -> Verdict:
        """What is known about a version; the default Verdict when nothing is."""

    def change(self, manifest: Manifest, change: Callable[[Verdict], Verdict]) -> Verdict:
        """Replace the verdict by what `change` makes of it; returns it. The repository's token changes with it."""

    def clear(self, manifest: Manifest) -> bool:
        """Forget what is known about a version: an operator wants it tried again. False: nothing was."""


class Repository(Protocol):
    """Raises Failure: NOT_FOUND, CONFLICT, STORAGE (no space), INTERNAL (the folder cannot be used)."""

    @property
    def proposals(self) -> Proposals:
        """Versions on trial."""

    @property
    def verdicts(self) -> Verdicts:
        """What running versions has shown."""

    def stage(self) -> Staging:
        """Open a staging area on the same storage as the versions, so that publishing is one rename."""

    def publish(self, staging: Staging, manifest: Manifest, *, activate: bool = False) -> None:
        """Make the staged files the version that `manifest` names, atomically and durably; `activate`: and the active one.

        Raises Failure(CONFLICT) if the version exists: versions are immutable. A full disk leaves nothing of it.
        """

    def models(self) -> Sequence[str]:
        """Names of the models that have an endpoint or a version, sorted."""

    def versions(self, model: str) -> Sequence[int]:
        """Published versions, ascending; empty for an unknown model."""

    def manifest(self, model: str, version: int) -> Manifest:
        """Raises Failure(NOT_FOUND)."""

    def local_path(self, model: str, version: int) -> Path:
        """A local folder that holds the version's files. Raises Failure(NOT_FOUND)."""

    def folder_of(self, manifest: Manifest) -> Path:
        """The local folder that the paths of a manifest, proposed or published, begin at."""

    def endpoint(self, model: str) -> Endpoint:
        """The model's endpoint document; generation 0 when none was written yet. Raises NOT_FOUND: no such model."""

    def replace_endpoint(self, endpoint: Endpoint) -> Endpoint:
        """Write `endpoint` if the stored generation still equals `endpoint.generation`; returns it one higher.

        Raises Failure(CONFLICT) when somebody else was faster: read again and decide again.
        """

    def delete_version(self, model: str, version: int) -> None:
        """Remove a version, atomically for readers. Raises Failure(NOT_FOUND)."""

    def delete_model(self, model: str) -> None:
        """Remove a model with all its versions. Raises Failure(NOT_FOUND)."""

    def next_version(self, model: str) -> int:
        """One more than the highest version that was ever published, so that numbers are not used again by themselves."""

    def stamp(self, model: str) -> Hashable:
        """Differs from an earlier one if anything of the model changed in between; it may differ without a change."""

    def token(self) -> str:
        """Changes whenever anything in the repository changes; cheap to call once a second."""
