"""What every repository does, whatever it is made of."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Endpoint
from millstream.services.repository.endpoint_changes import activate_version
from millstream.services.repository.folder import FolderRepository
from tests.contract.repositories import FACTORIES, is_whole, manifest, publish

Open = Callable[[], FolderRepository]


@pytest.fixture(params=sorted(FACTORIES))
def factory(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_again(factory: str, tmp_path: Path) -> Open:
    return lambda: FACTORIES[factory](tmp_path / "repository")


@pytest.fixture
def repository(open_again: Open) -> FolderRepository:
    return open_again()


def refused(code: Code, call: Callable[[], object]) -> str:
    with pytest.raises(Failure) as caught:
        call()
    assert caught.value.code is code
    return caught.value.message


def test_an_empty_repository_has_nothing(repository: FolderRepository) -> None:
    assert list(repository.models()) == []
    assert list(repository.versions("digits")) == []
    assert repository.next_version("digits") == 1
    for call in (
        lambda: repository.manifest("digits", 1),
        lambda: repository.local_path("digits", 1),
        lambda: repository.endpoint("digits"),
        lambda: repository.delete_version("digits", 1),
        lambda: repository.delete_model("digits"),
        lambda: repository.replace_endpoint(Endpoint(model="digits", active=1)),
    ):
        assert "no model 'digits'" in refused(Code.NOT_FOUND, call)


def test_a_published_version_is_there_whole_for_everybody(repository: FolderRepository, open_again: Open) -> None:
    publish(repository, version=10)
    publish(repository, version=9)
    other = open_again()
    assert list(other.models()) == ["digits"]
    assert list(other.versions("digits")) == [9, 10]
    assert other.manifest("digits", 10) == manifest(version=10)
    assert is_whole(other, "digits", 10)
    assert other.next_version("digits") == 11
    assert "no version 11" in refused(Code.NOT_FOUND, lambda: other.manifest("digits", 11))


def test_versions_are_immutable(repository: FolderRepository) -> None:
    publish(repository, digest="a" * 64)
    refused(Code.CONFLICT, lambda: publish(repository, digest="b" * 64))
    assert repository.manifest("digits", 1).digest == "a" * 64


def test_of_two_publishers_at_once_exactly_one_wins(repository: FolderRepository, open_again: Open) -> None:
    outcomes: list[str] = []
    together = threading.Barrier(8)

    def race(digest: str) -> None:
        mine = open_again()
        together.wait()
        try:
            publish(mine, digest=digest)
            outcomes.append(digest)
        except Failure as failure:
            outcomes.append(failure.code)

    racers = [threading.Thread(target=race, args=(str(n) * 64,)) for n in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert outcomes.count(Code.CONFLICT) == 7
    winner = next(outcome for outcome in outcomes if outcome != Code.CONFLICT)
    assert repository.manifest("digits", 1).digest == winner
    assert is_whole(repository, "digits", 1)


def test_a_staging_that_is_left_leaves_nothing(repository: FolderRepository) -> None:
    with repository.open_staging() as staging:
        (staging.path / "source").mkdir()
        (staging.path / "source/model.onnx").write_bytes(b"half")
        folder = staging.path
    assert not folder.exists()
    assert list(repository.models()) == []


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc", "a\0b", ".hidden", "x" * 129, "a b", "é", "a."])
def test_names_that_are_not_names_are_refused(repository: FolderRepository, name: str) -> None:
    for call in (
        lambda: repository.versions(name),
        lambda: repository.manifest(name, 1),
        lambda: repository.local_path(name, 1),
        lambda: repository.endpoint(name),
        lambda: repository.replace_endpoint(Endpoint(model=name)),
        lambda: repository.delete_version(name, 1),
        lambda: repository.delete_model(name),
        lambda: repository.next_version(name),
        lambda: publish(repository, model=name),
    ):
        refused(Code.INVALID, call)


@pytest.mark.parametrize("version", [0, -1, 2**31])
def test_numbers_that_are_not_versions_are_refused(repository: FolderRepository, version: int) -> None:
    refused(Code.INVALID, lambda: publish(repository, version=version))
    refused(Code.INVALID, lambda: repository.local_path("digits", version))


def test_the_endpoint_is_replaced_by_compare_and_set(repository: FolderRepository, open_again: Open) -> None:
    publish(repository)
    fresh = repository.endpoint("digits")
    assert fresh == Endpoint(model="digits", generation=0)
    first = repository.replace_endpoint(fresh.model_copy(update={"active": 1}))
    assert (first.generation, first.active) == (1, 1)
    refused(Code.CONFLICT, lambda: open_again().replace_endpoint(fresh.model_copy(update={"active": 7})))
    assert open_again().endpoint("digits") == first
    assert repository.replace_endpoint(first).generation == 2


def test_compare_and_set_loses_no_update(repository: FolderRepository, open_again: Open) -> None:
    publish(repository)
    rounds = 20

    def count_up() -> None:
        mine = open_again()
        done = 0
        while done < rounds:
            seen = mine.endpoint("digits")
            try:
                mine.replace_endpoint(seen.model_copy(update={"active": (seen.active or 0) + 1}))
                done += 1
            except Failure as failure:
                assert failure.code is Code.CONFLICT

    counters = [threading.Thread(target=count_up) for _ in range(4)]
    for counter in counters:
        counter.start()
    for counter in counters:
        counter.join()
    assert repository.endpoint("digits") == Endpoint(model="digits", generation=4 * rounds, active=4 * rounds)


def test_activating_keeps_what_was_active(repository: FolderRepository) -> None:
    publish(repository, version=1)
    publish(repository, version=2)
    assert activate_version(repository, "digits", 1).previous is None
    second = activate_version(repository, "digits", 2)
    assert (second.active, second.previous) == (2, 1)
    assert activate_version(repository, "digits", 2) == second
    refused(Code.NOT_FOUND, lambda: activate_version(repository, "digits", 3))
    assert repository.endpoint("digits") == second


def test_a_deleted_version_is_gone_and_its_number_is_not_given_out_again(repository: FolderRepository) -> None:
    publish(repository, version=1)
    publish(repository, version=2)
    repository.delete_version("digits", 2)
    assert list(repository.versions("digits")) == [1]
    refused(Code.NOT_FOUND, lambda: repository.local_path("digits", 2))
    refused(Code.NOT_FOUND, lambda: repository.delete_version("digits", 2))
    assert repository.next_version("digits") == 3
    repository.delete_version("digits", 1)
    assert list(repository.models()) == []
    assert repository.next_version("digits") == 3
    publish(repository, version=2)
    assert is_whole(repository, "digits", 2)


def test_a_deleted_model_takes_everything_with_it(repository: FolderRepository) -> None:
    publish(repository, model="digits")
    publish(repository, model="other")
    activate_version(repository, "digits", 1)
    repository.delete_model("digits")
    assert list(repository.models()) == ["other"]
    refused(Code.NOT_FOUND, lambda: repository.endpoint("digits"))
    publish(repository, model="digits")
    assert repository.endpoint("digits").active is None


def test_the_token_changes_with_every_change_and_only_then(repository: FolderRepository, open_again: Open) -> None:
    other = open_again()
    seen = [other.token()]
    changes: list[Callable[[], object]] = [
        lambda: publish(repository),
        lambda: activate_version(repository, "digits", 1),
        lambda: publish(repository, version=2),
        lambda: repository.delete_version("digits", 2),
        lambda: repository.delete_model("digits"),
    ]
    for change in changes:
        change()
        seen.append(other.token())
        assert other.token() == seen[-1]
    assert len(set(seen)) == len(seen)


def test_readers_see_only_whole_versions_while_others_write(repository: FolderRepository, open_again: Open) -> None:
    publish(repository, version=1)
    finished = threading.Event()
    reads: list[int] = []

    def read() -> None:
        mine = open_again()
        while not finished.is_set() or not reads:
            for version in mine.versions("digits"):
                try:
                    assert mine.manifest("digits", version) == manifest(version=version)
                    reads.append(version)
                except Failure as failure:
                    reads.append(-1 if failure.code is not Code.NOT_FOUND else version)
            mine.endpoint("digits")

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(2, 20):
        publish(repository, version=version)
        activate_version(repository, "digits", version)
        repository.delete_version("digits", version - 1)
    finished.set()
    reader.join()
    assert reads
    assert -1 not in reads


@pytest.mark.parametrize("read", ["endpoint", "versions", "models"])
def test_a_model_is_there_while_one_version_replaces_another(
    repository: FolderRepository, open_again: Open, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """The folder is listed; before its entry is looked at, that version gives way to another."""
    publish(repository, version=1)
    reader = open_again()
    listed = Path.iterdir

    def slow(folder: Path) -> Iterator[Path]:
        entries = [*listed(folder)]
        if folder.name == "digits":
            monkeypatch.undo()
            publish(repository, version=2)
            repository.delete_version("digits", 1)
        return iter(entries)

    monkeypatch.setattr(Path, "iterdir", slow)
    if read == "endpoint":
        assert reader.endpoint("digits").model == "digits"
    elif read == "versions":
        assert list(reader.versions("digits")) == [2]
    else:
        assert list(reader.models()) == ["digits"]
    assert list(repository.versions("digits")) == [2]  # it was replaced


def lives(factory: str, folder: Path, operation: str) -> list[FolderRepository]:
    """A repository for every moment at which a process that ran `operation` was killed; the last one was not."""
    command = [sys.executable, "-m", "tests.contract.crash", factory, str(folder), operation]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert run.returncode == 0, run.stderr
    roots = run.stdout.split()
    assert len(roots) > 5
    return [FACTORIES[factory](Path(root)) for root in roots]


def test_publishing_killed_anywhere_leaves_no_version_or_a_whole_one(factory: str, tmp_path: Path) -> None:
    outcomes = []
    for repository in lives(factory, tmp_path, "publish"):
        versions = list(repository.versions("digits"))
        assert versions in ([1], [1, 2])
        assert all(is_whole(repository, "digits", version) for version in versions)
        outcomes.append(versions)
        publish(repository, version=3)
        assert is_whole(repository, "digits", 3)
    assert outcomes[0] == [1]
    assert outcomes[-1] == [1, 2]


@pytest.mark.parametrize("operation", ["activate", "delete", "forget"])
def test_a_change_killed_anywhere_happened_or_did_not(factory: str, tmp_path: Path, operation: str) -> None:
    outcomes = []
    for repository in lives(factory, tmp_path, operation):
        versions = list(repository.versions("digits"))
        assert all(is_whole(repository, "digits", version) for version in versions)
        active = repository.endpoint("digits").active if versions else None
        outcomes.append((versions, active))
        publish(repository, version=repository.next_version("digits"))
    after = {"activate": ([1], 1), "delete": ([], None), "forget": ([], None)}[operation]
    assert set(map(str, outcomes)) == {str(([1], None)), str(after)}
    assert outcomes[-1] == after


# What only a folder does.


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "repository"


def test_a_change_cut_short_is_noticed_by_readers(root: Path) -> None:
    reader = FolderRepository(root)
    publish(reader)
    (root / ".token").write_text("changing 0123456789abcdef")
    assert reader.token() != reader.token()
    FolderRepository(root)
    assert reader.token() == reader.token()


def test_opening_removes_what_dead_processes_left_and_nothing_else(root: Path) -> None:
    living = FolderRepository(root)
    with living.open_staging() as staging:
        dead = root / ".staging" / "0123456789abcdef"
        dead.mkdir()
        (dead / "upload").write_bytes(b"x")
        dead.with_suffix(".lock").touch()
        orphan = root / ".staging" / "fedcba9876543210"
        orphan.mkdir()
        FolderRepository(root)
        assert not dead.exists()
        assert not dead.with_suffix(".lock").exists()
        assert not orphan.exists()
        assert staging.path.exists()
    assert list((root / ".staging").iterdir()) == []


def test_a_damaged_document_is_named_and_hurts_nobody_else(root: Path) -> None:
    repository = FolderRepository(root)
    publish(repository, model="hurt")
    publish(repository, model="well")
    (root / "models/hurt/1/manifest.json").write_text('{"format": 1, "mod')
    (root / "models/hurt/endpoint.json").write_text('{"model": "well"}')
    assert list(repository.models()) == ["hurt", "well"]
    assert "hurt/1/manifest.json" in refused(Code.INTERNAL, lambda: repository.manifest("hurt", 1))
    assert "hurt/endpoint.json" in refused(Code.INTERNAL, lambda: repository.endpoint("hurt"))
    assert repository.manifest("well", 1).model == "well"


def test_strange_entries_are_no_models_and_no_versions(root: Path) -> None:
    repository = FolderRepository(root)
    publish(repository)
    for strange in ("models/.x", "models/empty", "models/digits/x", "models/digits/007", "models/digits/5"):
        (root / strange).mkdir()
    (root / "models/file").touch()
    assert list(repository.models()) == ["digits"]
    assert list(repository.versions("digits")) == [1]


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (errno.ENOSPC, Code.STORAGE, "disk is full"),
        (errno.EDQUOT, Code.STORAGE, "disk is full"),
        (errno.EROFS, Code.INTERNAL, "Read-only"),
        (errno.EACCES, Code.INTERNAL, "Permission"),
        (errno.EIO, Code.INTERNAL, "Input/output"),
    ],
)
def test_a_disk_that_fails_is_said_in_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: Code, words: str
) -> None:
    repository = FolderRepository(root)

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    message = refused(code, lambda: publish(repository))
    assert words in message
    assert str(root) in message
    assert "\n" not in message
    monkeypatch.undo()
    assert list(repository.versions("digits")) == []
    assert list((root / ".staging").iterdir()) == []
    publish(repository)


def test_a_root_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(Code.INTERNAL, lambda: FolderRepository(tmp_path / "file"))
