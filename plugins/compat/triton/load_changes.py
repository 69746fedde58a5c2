"""Reads and writes the repository for loads and unloads of one model. Blocking: call it in a thread.

stage ─> workers load the versions ─> commit: manifests and endpoint change together
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Endpoint, Manifest
from millstream.services.repository.endpoint_changes import retry_on_conflict
from millstream.services.repository.folder import FolderRepository


class LoadChanges:
    """The steps of a load that change the repository."""

    def __init__(self, repository: FolderRepository) -> None:
        self._repository = repository

    def endpoint(self, model: str) -> Endpoint | None:
        """Return the endpoint of a model; None if it has none."""
        try:
            return self._repository.endpoint(model)
        except Failure as failure:
            if failure.code is not Code.NOT_FOUND:
                raise
            return None

    def manifests(self, model: str) -> dict[int, Manifest]:
        """Return the published manifests of a model, by version."""
        return {version: self._repository.manifest(model, version) for version in self._repository.versions(model)}

    def try_again(self, manifests: Sequence[Manifest], failed: Collection[str]) -> list[Manifest]:
        """Clear the verdicts for which workers refuse to load these versions.

        Args:
            manifests: The manifests of the versions.
            failed: Content ids of versions whose loads failed in a worker, which tries them no more by itself.

        Returns:
            The manifests. A version that failed, or had a verdict, gets a new content id, which no worker has tried.
        """
        return [
            one.model_copy(update={"created": time.time()})  # noqa: TID251 - shown to people
            if self._repository.verdicts.clear(one) or one.content_id in failed
            else one
            for one in manifests
        ]

    def unloaded(self, model: str, manifests: Sequence[Manifest]) -> list[Manifest]:
        """Return those of `manifests` that are published but unloaded: workers may still be unloading them."""
        endpoint, now = self.endpoint(model), self.manifests(model)
        return [
            one for one in manifests if now.get(one.version) == one and endpoint and not endpoint.serves(one.version)
        ]

    def stage(self, model: str, manifests: Sequence[Manifest]) -> list[Manifest]:
        """Stage those of `manifests` that do not serve now, so that workers load them; return the others."""
        endpoint, now = self.endpoint(model), self.manifests(model)
        new = [
            one for one in manifests if now.get(one.version) != one or not (endpoint and endpoint.serves(one.version))
        ]
        if new:
            self._repository.staged.stage(new)
        return [one for one in manifests if one not in new]

    def commit(self, model: str, manifests: Sequence[Manifest], folder: Path | None, owner: str) -> None:
        """Make the versions of `manifests`, and no other versions of the model, serve.

        Args:
            model: Name of the model.
            manifests: All manifests of the load.
            folder: The model repository in place that they come from; None: files of the call, or uploads.
            owner: Of the model, if the files of the call make a new one.
        """
        missing = Endpoint(model=model).with_owner(owner if folder is None else "")

        def attempt() -> None:
            before = self.endpoint(model) or missing
            now = self.manifests(model)
            after, dropped = _serving(before, list(now), [one.version for one in manifests], folder)
            if after == before and all(now.get(one.version) == one for one in manifests) and not dropped:
                return
            self._repository.staged.commit(after, manifests, dropped)

        retry_on_conflict(attempt)

    def unload(self, model: str) -> None:
        """Make no version of the model serve. An unknown model is no error."""
        self._change(model, lambda endpoint: endpoint.model_copy(update={"loaded": ()}))

    def note_failure(self, model: str, folder: Path, message: str) -> None:
        """Store why a load from `folder` failed, so that every gateway shows it."""
        missing = Endpoint(model=model, source=str(folder))
        self._change(model, lambda endpoint: endpoint.model_copy(update={"failure": message}), missing)

    def _change(self, model: str, change: Callable[[Endpoint], Endpoint], missing: Endpoint | None = None) -> None:
        """Replace the endpoint by `change(endpoint)`. `missing`: the endpoint to change if the model has none."""

        def attempt() -> None:
            endpoint = self.endpoint(model) or missing
            changed = change(endpoint) if endpoint else None
            if changed is None or changed == endpoint:
                return
            if self.endpoint(model) is None:
                self._repository.staged.commit(changed, ())
            else:
                self._repository.replace_endpoint(changed)

        retry_on_conflict(attempt)


def _serving(
    before: Endpoint, published: Sequence[int], served: Sequence[int], folder: Path | None
) -> tuple[Endpoint, list[int]]:
    """Return the endpoint with which `served` serve, and the published versions to delete.

    Other versions of an uploaded model are kept, unloaded; those of a model in place are deleted.
    """
    dropped = [version for version in published if version not in served] if folder is not None else []
    kept = {*published, *served} - set(dropped)
    active = before.active if before.active in served and folder is None else max(served)
    update = {
        "active": active,
        "previous": None,
        "loaded": None if kept == set(served) else tuple(sorted(served)),
        "source": str(folder) if folder is not None else None,
        "failure": "",
    }
    return before.model_copy(update=update), dropped
