"""What a gateway reads of the repository: only models that changed, and never something stale."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from millstream.services.errors import Failure
from millstream.services.model.manifest import Manifest
from millstream.services.repository.activation import activate_version
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.stored_models import StoredModels
from millstream.services.repository.verdicts import Verdict
from tests.kit.versions import publish


class _Counting(FolderRepository):
    """Notes which manifests are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[str] = []

    def manifest(self, model: str, version: int) -> Manifest:
        self.read.append(model)
        return super().manifest(model, version)


def _settle(root: Path) -> None:
    """Let all files be as old as those of a repository at rest."""
    import os

    for path in sorted(root.rglob("*"), reverse=True):
        os.utime(path, (1_700_000_000, 1_700_000_000), follow_symlinks=False)


def test_only_what_changed_is_read(tmp_path: Path) -> None:
    repository = _Counting(tmp_path)
    for name in ("a", "b", "c"):
        publish(repository, name, 1)
    stored = StoredModels(repository)
    assert stored.read() == {"a", "b", "c"}
    _settle(tmp_path)
    assert stored.read() == set()
    repository.read.clear()
    assert stored.read() == set()
    assert repository.read == []
    publish(repository, "b", 2)
    assert stored.read() == {"b"}
    assert set(repository.read) == {"b"}
    assert sorted(stored.models["b"].versions) == [1, 2]


@pytest.mark.parametrize("settled", [True, False])
def test_every_kind_of_change_is_seen(tmp_path: Path, settled: bool) -> None:
    repository = FolderRepository(tmp_path)
    first = publish(repository, "m", 1)
    publish(repository, "m", 2)
    publish(repository, "other", 1)
    stored = StoredModels(repository)
    stored.read()

    def seen() -> bool:
        found = "m" in stored.read()
        if settled:
            _settle(tmp_path)
            stored.read()
        return found

    seen()
    activate_version(repository, "m", 2)
    assert seen()
    assert stored.models["m"].endpoint.active == 2
    repository.verdicts.change(first, lambda verdict: verdict.with_failure("it crashes", 1.0))
    assert seen()
    assert stored.models["m"].versions[1][1].failed == "it crashes"
    repository.verdicts.change(first, lambda verdict: verdict.with_failure("it crashed", 1.0))  # of the same length
    assert seen()
    assert stored.models["m"].versions[1][1].failed == "it crashed"
    repository.verdicts.clear(first)
    assert seen()
    assert stored.models["m"].versions[1][1] == Verdict()
    repository.delete_version("m", 1)
    assert seen()
    repository.delete_model("m")
    assert seen()
    assert set(stored.models) == {"other"}


def test_a_damaged_model_is_left_out_and_read_again(tmp_path: Path) -> None:
    repository = FolderRepository(tmp_path)
    publish(repository, "good", 1)
    publish(repository, "bad", 1)
    activate_version(repository, "bad", 1)
    document = tmp_path / "models" / "bad" / "endpoint.json"
    whole = document.read_bytes()
    document.write_bytes(b"{")
    stored = StoredModels(repository)
    assert stored.read() == {"good"}
    document.write_bytes(whole)
    assert stored.read() == {"bad"}


def test_a_repository_that_cannot_be_listed_changes_nothing(tmp_path: Path) -> None:
    repository = FolderRepository(tmp_path)
    publish(repository, "m", 1)
    stored = StoredModels(repository)
    stored.read()
    shutil.rmtree(tmp_path / "models")
    with pytest.raises(Failure):
        stored.read()
    assert set(stored.models) == {"m"}
