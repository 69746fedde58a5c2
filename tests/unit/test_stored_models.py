"""What a gateway reads of the repository: only models that changed, and never something stale."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from millstream.services.errors import Failure
from millstream.services.model.manifest import Manifest
from millstream.services.repository import change_log
from millstream.services.repository.endpoint_changes import activate_version
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.stored_models import SCAN_S, StoredModels
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
    repository.verdicts.change(first, lambda verdict: verdict.with_failure("onnxruntime.cpu", "it crashes", 1.0))
    assert seen()
    assert stored.models["m"].versions[1][1].on("onnxruntime.cpu").failed == "it crashes"
    repository.verdicts.change(first, lambda verdict: verdict.with_failure("onnxruntime.cpu", "it crashed", 1.0))
    assert seen()
    assert stored.models["m"].versions[1][1].on("onnxruntime.cpu").failed == "it crashed"
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
    now = 0.0
    stored = StoredModels(repository, lambda: now)
    stored.read()
    now = SCAN_S
    shutil.rmtree(tmp_path / "models")
    with pytest.raises(Failure):
        stored.read()
    assert set(stored.models) == {"m"}


class _Listing(FolderRepository):
    """Counts how often all models are looked at."""

    scans = 0

    def models(self) -> Sequence[str]:
        self.scans += 1
        return super().models()


def test_a_change_of_one_model_looks_at_no_other(tmp_path: Path) -> None:
    repository, now = _Listing(tmp_path), 0.0
    for name in "abc":
        publish(repository, name, 1)
    stored = StoredModels(repository, lambda: now)
    stored.read()
    assert repository.scans == 1
    publish(FolderRepository(tmp_path), "b", 2)  # by another process
    repository.delete_model("c")
    assert stored.read() == {"b", "c"}
    assert set(stored.looked_at or ()) == {"b", "c"}
    assert set(stored.models) == {"a", "b"}
    assert repository.scans == 1
    (tmp_path / "models" / "b" / "2" / "manifest.json").unlink()  # by hand
    assert stored.read() == set()
    now = SCAN_S
    assert stored.read() == {"b"}
    assert repository.scans == 2


def test_a_change_in_progress_is_read_again(tmp_path: Path) -> None:
    repository = _Listing(tmp_path)
    publish(repository, "a", 1)
    stored = StoredModels(repository, lambda: 0.0)
    stored.read()
    with repository._changing("a"):
        assert stored.read() == set()
        (tmp_path / "models" / "a" / "1" / "manifest.json").unlink()
        assert stored.read() == {"a"}
        assert stored.read() == set()
    assert stored.read() == set()
    assert repository.scans == 1


def _append(root: Path, content: bytes) -> None:
    with (root / ".changes").open("ab") as file:
        file.write(content)


GAPS: dict[str, Callable[[FolderRepository, Path], None]] = {
    "a release without a log": lambda repository, root: repository._write_token("settled ", "0123456789abcdef"),
    "a line that was cut short": lambda repository, root: _append(root, b"\n0123"),
    "a log that was removed": lambda repository, root: (root / ".changes").unlink(),
    "bytes that are no text": lambda repository, root: _append(root, b"\xff\n"),
}


@pytest.mark.parametrize("gap", GAPS)
def test_a_gap_in_the_log_makes_readers_look_at_all_models(tmp_path: Path, gap: str) -> None:
    repository = _Listing(tmp_path)
    publish(repository, "a", 1)
    stored = StoredModels(repository, lambda: 0.0)
    stored.read()
    publish(repository, "b", 1)
    GAPS[gap](repository, tmp_path)
    publish(repository, "c", 1)
    assert stored.read() == {"b", "c"}
    assert repository.scans == 2
    publish(repository, "d", 1)
    assert stored.read() == {"d"}
    assert repository.scans == 2


def test_the_log_is_bounded_and_readers_find_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "LOG_BYTES_MAX", 200)
    repository = _Listing(tmp_path)
    stored, late = StoredModels(repository, lambda: 0.0), StoredModels(repository, lambda: 0.0)
    late.read()
    for number in range(20):
        publish(repository, f"m{number}", 1)
        assert stored.read() == {f"m{number}"}
        assert (tmp_path / ".changes").stat().st_size < 300
    assert repository.scans == 2
    assert len(late.read()) == 20
    assert repository.scans == 3
