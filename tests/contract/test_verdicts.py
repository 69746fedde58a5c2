"""What is known about versions from running them: kept with the repository, noticed by all, gone when it should be."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.repository.documents import content_digest
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.verdicts import (
    DOCUMENT_BYTES_MAX,
    FILES_MAX,
    KINDS_MAX,
    NO_VERDICT,
    LoadVerdict,
    Verdict,
)
from tests.contract.repositories import manifest, publish

CPU, GPU = "onnxruntime.cpu", "onnxruntime.cuda"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "repository"


@pytest.fixture
def repository(root: Path) -> FolderRepository:
    repository = FolderRepository(root)
    publish(repository)
    return repository


def failed(reason: str) -> Callable[[Verdict], Verdict]:
    return lambda verdict: verdict.with_failure(GPU, reason, 5.0)


def file_of(root: Path, model: str = "digits") -> Path:
    [path] = (root / "models" / model / "verdicts").iterdir()
    return path


def test_a_verdict_is_kept_and_every_reader_notices(repository: FolderRepository, root: Path) -> None:
    known = repository.manifest("digits", 1)
    assert repository.verdicts.of(known) == NO_VERDICT
    before = repository.token()
    assert repository.verdicts.change(known, failed("it crashes")).on(GPU).failed == "it crashes"
    assert repository.token() != before
    again = FolderRepository(root)
    assert again.verdicts.of(again.manifest("digits", 1)) == Verdict(
        loads={GPU: LoadVerdict(failed="it crashes", failed_at=5.0)}
    )
    assert again.verdicts.change(known, lambda one: one.with_batching_off("rows differ", 6.0)).on(GPU).failed
    assert repository.verdicts.of(known).batching_off == "rows differ"


def test_it_is_about_content_not_about_when_it_was_published(repository: FolderRepository) -> None:
    known = repository.manifest("digits", 1)
    repository.verdicts.change(known, failed("it crashes"))
    later = known.model_copy(update={"created": known.created + 1000, "notes": ("a note",), "origin": "/elsewhere"})
    assert repository.verdicts.of(later).on(GPU).failed
    for other in (
        known.model_copy(update={"digest": "e" * 64}),
        known.model_copy(update={"config": known.config.model_copy(update={"rows_max": 3})}),
        known.model_copy(update={"version": 2}),
    ):
        assert repository.verdicts.of(other) == NO_VERDICT


def test_clearing_and_taking_back_leave_nothing(repository: FolderRepository, root: Path) -> None:
    known = repository.manifest("digits", 1)
    assert not repository.verdicts.clear(known)
    repository.verdicts.change(known, failed("it crashes"))
    before = repository.token()
    assert repository.verdicts.clear(known)
    assert repository.token() != before
    assert repository.verdicts.of(known) == NO_VERDICT
    repository.verdicts.change(known, lambda one: one.with_loads(GPU, LoadVerdict(deaths=1)))
    repository.verdicts.change(known, lambda _: NO_VERDICT)
    assert not (root / "models/digits/verdicts").exists()


@pytest.mark.parametrize("gone", [lambda one: one.delete_version("digits", 1), lambda one: one.delete_model("digits")])
def test_it_goes_with_its_version(repository: FolderRepository, gone: Callable[[FolderRepository], None]) -> None:
    known = repository.manifest("digits", 1)
    repository.verdicts.change(known, failed("it crashes"))
    gone(repository)
    repository.verdicts.change(known, failed("too late"))  # by a worker that has not heard of it
    publish(repository)
    assert repository.verdicts.of(known) == NO_VERDICT
    repository.delete_model("digits")
    assert list(repository.models()) == []


def test_what_is_published_again_begins_without_one(repository: FolderRepository) -> None:
    staged = manifest(version=2).model_copy(update={"origin": "/models/digits"})
    repository.staged.stage([staged])
    repository.verdicts.change(staged, failed("it crashes"))
    repository.staged.abort("digits")
    assert repository.verdicts.of(staged).on(GPU).failed, "kept: the same files would crash the next time"
    publish(repository, version=2)
    assert repository.verdicts.of(repository.manifest("digits", 2)) == NO_VERDICT


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".kept"))
    path.symlink_to(path.with_suffix(".kept"))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b'{"failed": "cut'),
        lambda path: path.write_bytes(b'{"failed": 3}'),
        lambda path: path.write_bytes(b'{"failed": ["x"], "unknown": 1}'),
        lambda path: path.write_bytes(b"\xff" * 100),
        lambda path: path.write_bytes(b'{"failed": "' + b"x" * DOCUMENT_BYTES_MAX + b'"}'),
        _fifo,
        _link,
        _folder,
    ],
)
def test_a_damaged_file_counts_as_none_and_stops_nobody(
    repository: FolderRepository, root: Path, damage: Callable[[Path], None]
) -> None:
    known: Manifest = repository.manifest("digits", 1)
    repository.verdicts.change(known, failed("it crashes"))
    damage(file_of(root))
    assert repository.verdicts.of(known) == NO_VERDICT
    if file_of_is_folder := any(path.is_dir() for path in (root / "models/digits/verdicts").iterdir()):
        with pytest.raises(Failure) as refused:
            repository.verdicts.change(known, failed("again"))
        assert refused.value.code is Code.INTERNAL
    else:
        repository.verdicts.change(known, failed("again"))
    assert bool(repository.verdicts.of(known).on(GPU).failed) is not file_of_is_folder
    repository.delete_model("digits")


def test_what_a_newer_release_adds_does_not_hide_what_this_one_knows(repository: FolderRepository, root: Path) -> None:
    known = repository.manifest("digits", 1)
    repository.verdicts.change(known, failed("it crashes"))
    file_of(root).write_bytes(b'{"failed": "it crashes", "unknown": 1}')
    assert repository.verdicts.of(known).on(GPU).failed == "it crashes"


def test_many_processes_that_count_lose_nothing(repository: FolderRepository, root: Path) -> None:
    known = repository.manifest("digits", 1)

    def count() -> None:
        other = FolderRepository(root)
        for _ in range(10):
            other.verdicts.change(known, lambda one: one.with_loads(GPU, LoadVerdict(deaths=one.on(GPU).deaths + 1)))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert repository.verdicts.of(known).on(GPU).deaths == 40


def test_their_number_is_bounded_and_the_oldest_goes(repository: FolderRepository, root: Path) -> None:
    kinds = [manifest(digest=f"{number:064x}") for number in range(FILES_MAX + 3)]
    for number, one in enumerate(kinds):
        repository.verdicts.change(one, failed(str(number)))
        os.utime(next(iter((root / "models/digits/verdicts").glob(f"*{content_digest(one)}*"))), (number, number))
    assert len(list((root / "models/digits/verdicts").iterdir())) == FILES_MAX
    assert [repository.verdicts.of(one).on(GPU).failed for one in (kinds[0], kinds[2], kinds[3], kinds[-1])] == [
        "",
        "",
        "3",
        str(FILES_MAX + 2),
    ]


def test_a_failure_on_one_kind_of_worker_is_none_on_another(repository: FolderRepository) -> None:
    known = repository.manifest("digits", 1)
    found = repository.verdicts.change(known, failed("it crashes the driver"))
    assert found.on(GPU).failed == "it crashes the driver"
    assert not found.on(CPU).failed
    assert not found.failed_on({CPU, GPU})
    assert not found.failed_on(())
    found = repository.verdicts.change(known, lambda one: one.with_failure(CPU, "it never ends", 6.0))
    assert found.failed_on({CPU, GPU}) == f"{CPU}: it never ends; {GPU}: it crashes the driver"
    assert found.failed_on({CPU}) == "it never ends"
    assert {kind: one.failed_at for kind, one in found.failures.items()} == {GPU: 5.0, CPU: 6.0}


def test_deaths_are_counted_on_each_kind_of_worker(repository: FolderRepository) -> None:
    found = NO_VERDICT.with_loads(GPU, LoadVerdict(deaths=1)).with_loads(CPU, LoadVerdict(deaths=2))
    found = found.with_load(GPU)
    assert (found.on(GPU).deaths, found.on(CPU).deaths) == (0, 2)
    assert found.with_load(CPU) == NO_VERDICT


def test_a_document_of_an_earlier_release_holds_on_every_kind(repository: FolderRepository, root: Path) -> None:
    known = repository.manifest("digits", 1)
    repository.verdicts.change(known, failed("replaced next"))
    before = (
        '{"failed":"it crashes","failed_at":5.0,"load_deaths":2,"batching_off":"","batching_off_at":0,"mismatches":0}'
    )
    file_of(root).write_text(before)
    found = repository.verdicts.of(known)
    assert [found.on(kind) for kind in (CPU, GPU)] == [LoadVerdict(failed="it crashes", failed_at=5.0, deaths=2)] * 2
    assert found.failed_on({CPU, GPU}) == found.failed_on(()) == "it crashes"
    assert list(found.failures) == [""]
    file_of(root).write_text('{"failed":"","failed_at":0.0,"load_deaths":1}')
    found = repository.verdicts.of(known)
    assert (found.on(CPU).deaths, found.failures) == (1, {})
    assert found.with_load(CPU) == NO_VERDICT


def test_kinds_are_bounded(repository: FolderRepository) -> None:
    known = repository.manifest("digits", 1)
    for number in range(KINDS_MAX + 3):
        repository.verdicts.change(known, lambda one, number=number: one.with_failure(f"kind.{number}", "bad", 1.0))  # type: ignore[misc]
    assert len(repository.verdicts.of(known).failures) == KINDS_MAX
    assert repository.verdicts.of(known).on(f"kind.{KINDS_MAX + 2}").failed
