"""Staged versions: invisible until the commit, gone after an abort, and one process at a time may load a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Endpoint, Manifest
from millstream.services.repository.endpoint_changes import activate_version
from millstream.services.repository.folder import FolderRepository
from tests.kit.versions import publish


@pytest.fixture
def repository(tmp_path: Path) -> FolderRepository:
    return FolderRepository(tmp_path)


def other(manifest: Manifest, **fields: object) -> Manifest:
    return manifest.model_copy(update={"created": manifest.created + 1, **fields})


def replace(repository: FolderRepository, manifest: Manifest, endpoint: Endpoint | None = None) -> None:
    """Stage a manifest and commit it."""
    repository.staged.stage([manifest])
    repository.staged.commit(endpoint or repository.endpoint(manifest.model), [manifest])


def files(repository: FolderRepository, tmp_path: Path) -> set[str]:
    return {str(path.relative_to(tmp_path / "models")) for path in (tmp_path / "models").rglob("*") if path.is_file()}


def test_staged_versions_change_nothing_until_the_commit(repository: FolderRepository, tmp_path: Path) -> None:
    first = publish(repository, "m", 1)
    second = other(first)
    token, before = repository.token(), files(repository, tmp_path)
    repository.staged.stage([second])
    assert repository.token() != token
    assert (repository.manifest("m", 1), repository.versions("m")) == (first, [1])
    assert (repository.staged.models(), repository.staged.of("m")) == (["m"], [second])
    repository.staged.abort("m")
    assert (repository.staged.models(), files(repository, tmp_path)) == ([], before)

    repository.staged.stage([second])
    endpoint = repository.endpoint("m")
    written = repository.staged.commit(endpoint.model_copy(update={"active": 1}), [second])
    assert written.generation == endpoint.generation + 1
    assert (repository.manifest("m", 1), repository.endpoint("m")) == (second, written)
    assert repository.staged.models() == []


def test_the_original_manifest_is_kept(repository: FolderRepository, tmp_path: Path) -> None:
    first = publish(repository, "m", 1)
    before = files(repository, tmp_path) | {"m/endpoint.json"}
    for manifest in (other(first), other(first, created=9.0)):
        replace(repository, manifest)
        assert repository.staged.original("m", 1) == first
    replace(repository, first)
    assert (repository.manifest("m", 1), repository.staged.original("m", 1)) == (first, first)
    assert files(repository, tmp_path) == before
    assert repository.staged.original("m", 2) is None


def test_a_model_that_was_not_there_and_goes_again(repository: FolderRepository, tmp_path: Path) -> None:
    manifest = other(publish(repository, "m", 1), model="new", version=3, origin=str(tmp_path))
    repository.staged.stage([manifest])
    assert "new" not in repository.models()
    repository.staged.abort("new")
    assert not (tmp_path / "models" / "new").exists()
    replace(repository, manifest, Endpoint(model="new", active=3, source=str(tmp_path)))
    assert (repository.versions("new"), repository.local_path("new", 3)) == ([3], tmp_path)
    after = repository.endpoint("new").model_copy(update={"active": None})
    repository.staged.commit(after, [], removed=[3])
    assert (repository.versions("new"), repository.models()) == ([], ["m", "new"])


def test_who_was_slower_decides_again(repository: FolderRepository) -> None:
    manifest = publish(repository, "m", 1)
    endpoint = repository.endpoint("m")
    activate_version(repository, "m", 1)
    with pytest.raises(Failure) as caught:
        repository.staged.commit(endpoint, [other(manifest)])
    assert caught.value.code is Code.CONFLICT
    assert repository.manifest("m", 1) == manifest


@pytest.mark.parametrize("whole_model", [True, False], ids=["model", "version"])
def test_what_was_deleted_meanwhile_does_not_come_back(repository: FolderRepository, whole_model: bool) -> None:
    first, second = publish(repository, "m", 1), publish(repository, "m", 2)
    repository.staged.stage([other(first)])
    repository.staged.check_kept([other(first), second])
    endpoint = repository.endpoint("m")
    if whole_model:
        repository.delete_model("m")
        endpoint = Endpoint(model="m", active=1)
    else:
        repository.delete_version("m", 1)
    with pytest.raises(Failure, match="version 1 was deleted meanwhile") as caught:
        repository.staged.commit(endpoint, [other(first), second])
    assert caught.value.code is Code.NOT_FOUND
    repository.staged.abort("m")
    assert repository.versions("m") == ([] if whole_model else [2])


def test_an_upload_that_was_deleted_is_not_staged(repository: FolderRepository) -> None:
    first, second = publish(repository, "m", 1), publish(repository, "m", 2)
    repository.delete_version("m", 1)
    with pytest.raises(Failure, match="version 1 was deleted meanwhile"):
        repository.staged.stage([other(second), other(first)])
    assert (repository.staged.models(), repository.versions("m")) == ([], [2])


def test_given_files_stay_as_long_as_a_manifest_needs_them(repository: FolderRepository, tmp_path: Path) -> None:
    def give(content: bytes) -> Path:
        with repository.open_staging() as staging:
            (staging.path / "model.onnx").write_bytes(content)
            return repository.staged.add_files("m", staging)

    manifest = publish(repository, "m", 1)
    kept, lost = give(b"kept"), give(b"lost")
    replace(repository, other(manifest, origin=str(kept)))
    assert (kept.is_dir(), lost.is_dir()) == (True, False)
    assert (repository.local_path("m", 1) / "model.onnx").read_bytes() == b"kept"
    repository.staged.abort("m")
    assert kept.is_dir()
    replace(repository, manifest)
    assert not (tmp_path / "models" / "m" / "added_files").exists()
    assert list((tmp_path / ".staging").iterdir()) == []


def test_one_process_loads_a_model_at_a_time(repository: FolderRepository, tmp_path: Path) -> None:
    lock = repository.staged.lock("m")
    assert lock is not None
    assert FolderRepository(tmp_path).staged.lock("m") is None
    another = repository.staged.lock("n")
    assert another is not None
    another.release()
    repository.staged.stage([publish(repository, "m", 1)])
    lock.release()
    lock.release()
    successor = FolderRepository(tmp_path).staged.lock("m")  # versions that a dead process staged are aborted
    assert successor is not None
    assert repository.staged.models() == []
    successor.release()


def test_activating_a_version_loads_it(repository: FolderRepository) -> None:
    for version in (1, 2, 3):
        publish(repository, "m", version)
    activate_version(repository, "m", 1)
    repository.replace_endpoint(repository.endpoint("m").model_copy(update={"loaded": ()}))
    assert not repository.endpoint("m").serves(1)
    activate_version(repository, "m", 1)
    assert repository.endpoint("m").loaded == (1,)
    activate_version(repository, "m", 3)
    assert (repository.endpoint("m").loaded, repository.endpoint("m").serves(2)) == ((1, 3), False)
