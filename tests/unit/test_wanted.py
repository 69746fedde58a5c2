"""Which versions a worker may hold and which it preloads, while others stage, commit and abort loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.services.model.manifest import Endpoint, Manifest, ModelConfig
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.stored_models import StoredModels
from millstream.workers.models.wanted import WantedVersions
from tests.kit.versions import publish


@pytest.fixture
def staged(tmp_path: Path) -> tuple[FolderRepository, Manifest]:
    """A repository, and a version of "m" that is staged there."""
    repository = FolderRepository(tmp_path / "repository")
    publish(repository, "other", 1)
    uploaded = publish(FolderRepository(tmp_path / "elsewhere"), "m", 1, ModelConfig(pools=("cpu",)))
    manifest = uploaded.model_copy(update={"origin": str(tmp_path / "elsewhere")})
    repository.staged.stage([manifest])
    return repository, manifest


def _before(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], when: str) -> None:
    """Act once, right before or after the published versions are read."""
    read = StoredModels.read

    def acting(stored: StoredModels) -> set[str]:
        monkeypatch.undo()
        if when == "before":
            act()
        changed = read(stored)
        if when == "after":
            act()
        return changed

    monkeypatch.setattr(StoredModels, "read", acting)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_version_that_is_committed_while_the_repository_is_read_stays_wanted(
    staged: tuple[FolderRepository, Manifest], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    repository, manifest = staged
    versions = WantedVersions(repository, "cpu")
    assert versions.read()[manifest.content_id].staged
    endpoint = Endpoint(model="m", active=1, loaded=(1,))
    _before(monkeypatch, lambda: repository.staged.commit(endpoint, [manifest]), when)
    assert manifest.content_id in versions.read()
    assert not versions.read()[manifest.content_id].staged


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_version_whose_load_is_aborted_is_wanted_no_more(
    staged: tuple[FolderRepository, Manifest], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    repository, manifest = staged
    versions = WantedVersions(repository, "cpu")
    assert manifest.content_id in versions.read()
    _before(monkeypatch, lambda: repository.staged.abort("m"), when)
    versions.read()
    assert manifest.content_id not in versions.read()


@pytest.mark.parametrize(
    ("endpoint", "preloaded", "outdated"),
    [
        (Endpoint(model="m", active=5, previous=4), {5}, {1, 2, 3}),
        (Endpoint(model="m", active=3, previous=2), {3, 5}, {1, 4}),
        (Endpoint(model="m", active=2, previous=5), {2, 5}, {1, 3, 4}),
        (Endpoint(model="m"), {5}, {1, 2, 3, 4}),
        (Endpoint(model="m", active=5, loaded=(1, 5)), {1, 5}, set()),
        (Endpoint(model="m", active=5, loaded=()), set(), set()),
        (Endpoint(model="m", active=5, source="/models"), {1, 2, 3, 4, 5}, set()),
    ],
)
def test_what_serves_is_preloaded_and_what_was_replaced_is_outdated(
    tmp_path: Path, endpoint: Endpoint, preloaded: set[int], outdated: set[int]
) -> None:
    repository = FolderRepository(tmp_path)
    for version in range(1, 6):
        publish(repository, "m", version)
    generation = repository.endpoint("m").generation
    repository.replace_endpoint(endpoint.model_copy(update={"generation": generation}))
    wanted = WantedVersions(repository, "cpu").read().values()
    assert {one.manifest.version for one in wanted if one.preloaded} == preloaded
    assert {one.manifest.version for one in wanted if one.outdated} == outdated
