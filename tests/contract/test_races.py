"""The documents of races and choices in a real folder repository."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.plugins.compile.stored import races as races_module
from millstream.plugins.compile.stored.choices import Choice, ChosenVariant
from millstream.plugins.compile.stored.races import PAST_MAX, Race, RaceKey, RaceOptions, RaceState, Undone, new_race
from millstream.services.errors import Failure
from millstream.services.model.manifest import Manifest, SourceFile
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.verdicts import content_digest
from tests.kit.versions import publish

KIND, DEVICE = "onnxruntime.cpu", "cpu-0123456789abcdef"


@pytest.fixture
def repository(tmp_path: Path) -> FolderRepository:
    return FolderRepository(tmp_path / "repository")


def race(manifest: Manifest, now: float = 1.0, device: str = DEVICE) -> Race:
    return new_race(manifest, KIND, device, "cpu", now)


def stored(repository: FolderRepository, one: Race) -> Race:
    after = repository.races.change(one.key, lambda _: one)
    assert after == one
    return one


def choice(manifest: Manifest, files: tuple[SourceFile, ...] = ()) -> Choice:
    variant = ChosenVariant(key="a-1", target="a", folder="race-1/a-1", files=files, backend="openvino")
    content = content_digest(manifest)
    return Choice(content=content, kind=KIND, device=DEVICE, table={1: "baseline", 16: "a-1"}, variants=(variant,))


def test_a_race_is_found_by_other_processes(repository: FolderRepository, tmp_path: Path) -> None:
    one = stored(repository, race(publish(repository, "m", 1)))
    other = FolderRepository(tmp_path / "repository")
    assert other.races.all() == [one]
    assert other.races.of("m", 1) == [one]
    assert other.races.get(one.key) == one
    assert other.races.of("m", 2) == []


def test_models_whose_names_begin_alike_have_races_of_their_own(repository: FolderRepository) -> None:
    names = ("m", "m-1", "m.1")
    manifests = [publish(repository, name, version) for name in names for version in (1, 11)]
    for manifest in manifests:
        stored(repository, race(manifest))
    assert [one.model for one in repository.races.of("m", 1)] == ["m"]
    repository.delete_version("m", 1)
    assert {(one.model, one.version) for one in repository.races.all()} == {
        (manifest.model, manifest.version) for manifest in manifests[1:]
    }
    repository.delete_model("m-1")
    assert {one.model for one in repository.races.all()} == {"m", "m.1"}


def test_a_change_of_a_race_is_seen_without_reading_the_others(repository: FolderRepository) -> None:
    one = stored(repository, race(publish(repository, "m", 1)))
    two = stored(repository, race(publish(repository, "n", 1)))
    first = repository.races.all()
    repository.races.change(one.key, lambda _: one.ended(RaceState.FAILED, 2.0, "it died"))
    second = {each.model: each for each in repository.races.all()}
    assert second["m"].why == "it died"
    assert second["n"] is next(each for each in first if each == two)


def test_a_change_that_gives_nothing_back_writes_nothing(repository: FolderRepository, tmp_path: Path) -> None:
    folder = tmp_path / "repository" / "races"
    one = stored(repository, race(publish(repository, "m", 1)))
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("*.json"))
    assert repository.races.change(one.key, lambda _: None) == one
    assert repository.races.change(RaceKey("n", 1, KIND, DEVICE), lambda _: None) is None
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("*.json")) == before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": "m"}', b"\xff" * 100, b"{}" * (3 << 20)])
def test_a_damaged_race_counts_as_none(repository: FolderRepository, tmp_path: Path, content: bytes) -> None:
    one = stored(repository, race(publish(repository, "m", 1)))
    (tmp_path / "repository" / "races" / f"{one.key.name}.json").write_bytes(content)
    assert repository.races.all() == []
    assert repository.races.get(one.key) is None
    assert stored(repository, one) == one


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open no further file during the block."""
    lowest = os.dup(0)
    os.close(lowest)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_races_that_cannot_be_listed_do_not_seem_to_be_deleted(repository: FolderRepository) -> None:
    one = stored(repository, race(publish(repository, "m", 1)))
    with no_descriptors():
        for read in (repository.races.all, lambda: repository.races.of("m", 1), lambda: repository.races.get(one.key)):
            with pytest.raises(Failure, match="Too many open files"):
                read()
        with pytest.raises(Failure, match="Too many open files"):
            repository.races.change(one.key, lambda _: race(publish(repository, "m", 2)))
    assert repository.races.all() == [one]


def test_a_race_that_cannot_be_read_at_present_is_as_it_was_read_last(
    repository: FolderRepository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = stored(repository, race(publish(repository, "m", 1)))
    other = stored(repository, race(publish(repository, "n", 1)))
    assert repository.races.all() == [one, other]
    path = tmp_path / "repository" / "races" / f"{one.key.name}.json"
    path.rename(path.with_suffix(".away"))
    path.mkdir()  # what root cannot read either
    for _ in range(3):
        assert repository.races.all() == [one, other]
    assert len(caplog.records) == 1, "it is said once, not at each look"
    with pytest.raises(Failure, match="Is a directory"):
        repository.races.change(one.key, lambda before: before or race(publish(repository, "m", 2)))
    path.rmdir()
    path.with_suffix(".away").rename(path)
    assert repository.races.all() == [one, other]


def test_a_race_of_a_deleted_version_leaves_no_folder_in_the_way_of_the_next_upload(
    repository: FolderRepository,
) -> None:
    manifest = publish(repository, "m", 1)
    repository.delete_model("m")
    with pytest.raises(Failure, match="version 1 of 'm' was deleted"):
        repository.choices.make_cache(manifest, KIND, DEVICE)
    assert publish(repository, "m", 1) == manifest
    assert repository.choices.make_cache(manifest, KIND, DEVICE).is_dir()


def test_a_kill_between_the_write_and_the_rename_leaves_the_race_as_it_was(
    repository: FolderRepository, tmp_path: Path
) -> None:
    one = stored(repository, race(publish(repository, "m", 1)))
    path = tmp_path / "repository" / "races" / f"{one.key.name}.json"
    content = path.read_bytes()
    for length in range(0, len(content), 37):
        path.with_name(path.name + ".new").write_bytes(content[:length])
        assert FolderRepository(tmp_path / "repository").races.all() == [one]


def test_one_worker_runs_a_race_and_one_race_a_device(repository: FolderRepository) -> None:
    key = race(publish(repository, "m", 1)).key
    lock = repository.races.try_run(key)
    assert lock is not None
    assert repository.races.try_run(key) is None
    lock.release()
    lock.release()
    assert repository.races.try_run(key) is not None
    device = repository.races.try_device("host", "cpu")
    assert device is not None
    assert repository.races.try_device("host", "cpu") is None
    assert repository.races.try_device("host", "cuda:0") is not None
    assert repository.races.try_device("other", "cpu") is not None


def test_a_race_that_begins_anew_remembers_how_earlier_ones_ended(repository: FolderRepository) -> None:
    one = race(publish(repository, "m", 1))
    for number in range(PAST_MAX + 3):
        report = {"winner": f"w-{number}", "ratio": 2.0}
        one = one.ended(RaceState.DECIDED, float(number), report=report)
        one = one.model_copy(update={"undone": Undone(why="slower", at=1.0)})
        one = one.requeued(number + 0.5, RaceOptions(seconds=5), {4: 1.0}, "the library changed")
        assert (one.state, one.report, one.undone, one.tries) == (RaceState.QUEUED, None, None, 0)
        assert one.rows == {4: 1.0}
    assert [past.winner for past in one.past] == [f"w-{number}" for number in range(PAST_MAX + 2, 2, -1)]
    assert one.past[0].why == "slower"
    assert Race.model_validate_json(one.model_dump_json()) == one


def test_a_race_that_begins_anew_keeps_what_earlier_ones_found_out_of_candidates(repository: FolderRepository) -> None:
    one = race(publish(repository, "m", 1))
    assert one.known_trials() == ()
    rows = [{"target": "a", "candidate": name, "verdict": "lost", "compile_s": 2.0} for name in ("a-1", "a-2")]
    one = one.ended(RaceState.DECIDED, 1.0, report={"rows": rows, "fingerprint": "cpu-1", "model_bytes": 9})
    assert one.fingerprint == "cpu-1"
    one = one.requeued(2.0, RaceOptions(), {})
    assert one.fingerprint == ""
    assert {trial.candidate: trial.seconds for trial in one.known_trials()} == {"a-1": 2.0, "a-2": 2.0}
    rows = [{"target": "a", "candidate": "a-2", "verdict": "lost", "compile_s": 5.0}]
    one = one.ended(RaceState.DECIDED, 3.0, report={"rows": rows})
    assert {trial.candidate: trial.seconds for trial in one.known_trials()} == {"a-1": 2.0, "a-2": 5.0}
    one = one.ended(RaceState.CANCELLED, 4.0).requeued(5.0, RaceOptions(), {})
    assert {trial.candidate: trial.seconds for trial in one.known_trials()} == {"a-1": 2.0, "a-2": 2.0}
    assert Race.model_validate_json(one.model_dump_json()) == one


def test_races_are_bounded(repository: FolderRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(races_module, "RACES_MAX", 3)
    for number in range(1, 6):
        one = race(publish(repository, "m", number))
        stored(repository, one)
        if number != 2:
            stored(repository, one.ended(RaceState.DECIDED, float(number)))
    assert {one.version for one in repository.races.all()} == {2, 4, 5}


@pytest.mark.parametrize(
    "parts",
    [
        {"report": {"rows": 5}},
        {"report": {"rows": [1]}},
        {"report": {"rows": [{"verdict": "won"}]}},
        {"report": {"ratio": "fast"}},
        {"report": {"table": [1]}},
        {"report": {"winner": ["x"]}},
        {"report": {"baseline": 5}},
        {"report": {"notes": 7}},
        {"progress": {"ratios": {"a": "b"}}},
        {"progress": {"seconds": "long"}},
        {"model": "another"},
        {"model": "../m"},
        {"version": -1},
        {"kind": "../../kind"},
    ],
)
def test_a_race_that_cannot_be_shown_or_is_of_another_version_counts_as_none(
    repository: FolderRepository, tmp_path: Path, parts: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    one = stored(repository, race(publish(repository, "m", 1)))
    path = tmp_path / "repository" / "races" / f"{one.key.name}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "decided", **parts}))
    for _ in range(3):
        assert repository.races.all() == []
    assert len(caplog.records) == 1, "it is said once, not at each look"
    assert repository.races.of("m", 1) == []
    assert stored(repository, one) == one


def test_a_choice_is_read_as_it_was_written_and_goes_with_its_version(
    repository: FolderRepository, tmp_path: Path
) -> None:
    manifest = publish(repository, "m", 1)
    assert repository.choices.get(manifest, KIND, DEVICE) is None
    repository.choices.write(manifest, choice(manifest))
    assert repository.choices.get(manifest, KIND, DEVICE) == choice(manifest)
    assert repository.choices.get(manifest, "openvino.cpu", DEVICE) is None
    assert repository.choices.get(manifest, KIND, "another device") is None
    assert repository.choices.get(manifest.model_copy(update={"digest": "0" * 64}), KIND, DEVICE) is None
    assert repository.choices.remove(manifest, KIND, DEVICE)
    assert not repository.choices.remove(manifest, KIND, DEVICE)
    repository.choices.write(manifest, choice(manifest))
    repository.delete_version("m", 1)
    assert repository.choices.get(manifest, KIND, DEVICE) is None
    with pytest.raises(Failure, match="deleted"):
        repository.choices.write(manifest, choice(manifest))
    assert not (tmp_path / "repository" / "models" / "m" / "1").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b" " * (2 << 20)])
def test_a_damaged_choice_is_not_followed(
    repository: FolderRepository, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = publish(repository, "m", 1)
    repository.choices.write(manifest, choice(manifest))
    [path] = repository.choices.compiled(manifest).glob("choice-*.json")
    path.write_bytes(content)
    for _ in range(3):
        assert repository.choices.get(manifest, KIND, DEVICE) is None
    assert len(caplog.records) == 1, "it is said once, not at each look"


@pytest.mark.parametrize(
    "parts",
    [
        {"table": {"16": "another"}},
        {"table": {"0": "a-1"}},
        {"table": {"-1": "a-1", "16": "baseline"}},
        {"table": {"16": "baseline"}},
        {"variants": []},
    ],
)
def test_a_choice_whose_table_does_not_fit_is_not_followed(
    repository: FolderRepository, parts: dict[str, object]
) -> None:
    manifest = publish(repository, "m", 1)
    repository.choices.write(manifest, choice(manifest))
    [path] = repository.choices.compiled(manifest).glob("choice-*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    assert repository.choices.get(manifest, KIND, DEVICE) is None


def test_a_damaged_variant_is_an_error_and_never_loaded(repository: FolderRepository, tmp_path: Path) -> None:
    manifest = publish(repository, "m", 1)
    folder = repository.choices.compiled(manifest) / "race-1" / "a-1"
    folder.mkdir(parents=True)
    (folder / "a.onnx").write_bytes(b"abc")
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    good = choice(manifest, (SourceFile(path="a.onnx", size_bytes=3, sha256=sha256),)).variants[0]
    own = tmp_path / "own.onnx"
    assert repository.choices.file(manifest, good, own) == folder / "a.onnx"
    assert repository.choices.file(manifest, good.model_copy(update={"files": ()}), own) == own
    (folder / "a.onnx").write_bytes(b"abd")
    with pytest.raises(Failure, match="sha256 differs"):
        repository.choices.file(manifest, good, own)
    (folder / "a.onnx").unlink()
    with pytest.raises(Failure, match=r"a\.onnx cannot be read"):
        repository.choices.file(manifest, good, own)
    outside = good.model_copy(update={"folder": "../../../.."})
    with pytest.raises(Failure, match="not in the variant's folder"):
        repository.choices.file(manifest, outside, own)


def test_folders_of_losers_are_deleted(repository: FolderRepository) -> None:
    manifest = publish(repository, "m", 1)
    cache = repository.choices.cache(manifest, KIND, DEVICE)
    for name in ("a-1", "b-2", "c-3"):
        (cache / name).mkdir(parents=True)
        (cache / name / "model").write_bytes(b"x")
    repository.choices.sweep(manifest, KIND, DEVICE, {"b-2"})
    assert [path.name for path in cache.iterdir()] == ["b-2"]
