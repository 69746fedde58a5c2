"""Deleting versions while others activate: on a real repository, with another process that is always faster."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.gateway.admin.removal import remove_version
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Endpoint
from millstream.services.repository.endpoint_changes import TRIES_MAX, activate_version
from millstream.services.repository.folder import FolderRepository
from tests.kit.versions import publish


class Contended(FolderRepository):
    """Before each of the next endpoint documents is written, another process activates one of `rivals`."""

    rivals: list[int]

    def replace_endpoint(self, endpoint: Endpoint) -> Endpoint:
        if self.rivals:
            rival = self.rivals.pop(0)
            current = self.endpoint(endpoint.model)
            super().replace_endpoint(current.model_copy(update={"active": rival, "previous": current.active}))
        return super().replace_endpoint(endpoint)


@pytest.fixture
def repository(tmp_path: Path) -> Contended:
    """Model m: versions 1, 2, 3, of which 2 is active after 1."""
    repository = Contended(tmp_path)
    repository.rivals = []
    for version in (1, 2, 3):
        publish(repository, "m", version)
    activate_version(repository, "m", 1)
    activate_version(repository, "m", 2)
    return repository


def names(repository: FolderRepository) -> tuple[int | None, int | None]:
    endpoint = repository.endpoint("m")
    return endpoint.active, endpoint.previous


def test_a_rival_activation_is_kept(repository: Contended) -> None:
    repository.rivals = [3]
    remove_version(repository, "m", 2, serving=1, force=False)
    assert names(repository) == (3, None)
    assert list(repository.versions("m")) == [1, 3]


def test_a_rival_that_activates_the_version_itself_loses(repository: Contended) -> None:
    repository.rivals = [1, 2]
    remove_version(repository, "m", 2, serving=1, force=False)
    assert names(repository) == (1, None)


def test_the_name_goes_back_to_the_version_that_answers(repository: Contended) -> None:
    activate_version(repository, "m", 3)
    # 2 came before 3 but never got ready: 1 still answers
    remove_version(repository, "m", 3, serving=1, force=False)
    assert names(repository) == (1, None)


def test_the_version_before_the_active_one_is_forgotten(repository: Contended) -> None:
    remove_version(repository, "m", 1, serving=2, force=False)
    assert names(repository) == (2, None)


def test_the_model_goes_with_its_only_version(repository: Contended) -> None:
    for version in (1, 3):
        repository.delete_version("m", version)
    with pytest.raises(Failure, match="is serving: delete the model, or its only version with"):
        remove_version(repository, "m", 2, serving=2, force=False)
    remove_version(repository, "m", 2, serving=2, force=True)
    assert list(repository.models()) == []


def test_a_version_that_is_published_meanwhile_keeps_the_model(repository: Contended) -> None:
    repository.delete_model("m", if_empty=True)
    assert list(repository.versions("m")) == [1, 2, 3]


def test_endless_contention_is_a_conflict_that_deletes_nothing(repository: Contended) -> None:
    repository.rivals = [2, 1] * TRIES_MAX
    with pytest.raises(Failure, match="was changed in between") as failed:
        remove_version(repository, "m", 2, serving=1, force=False)
    assert failed.value.code is Code.CONFLICT
    assert list(repository.versions("m")) == [1, 2, 3]
