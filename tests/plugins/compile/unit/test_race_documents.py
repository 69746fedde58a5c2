"""The documents of races and of what they selected, in a real folder repository."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.plugins.compile.race.report import BASELINE, RaceReport
from millstream.plugins.compile.stored.job import (
    PAST_MAX,
    Job,
    Jobs,
    RaceOptions,
    RaceState,
    RaceUndone,
    find_samples,
    new_job,
    sweep_samples,
)
from millstream.plugins.compile.stored.selection import Form, Selection, Selections
from millstream.services.errors import Failure
from millstream.services.model.manifest import Manifest, SourceFile
from millstream.services.repository.documents import content_digest
from millstream.services.repository.endpoint_changes import changed as changed_settings
from millstream.services.repository.folder import FolderRepository
from tests.kit.versions import publish

KIND, DEVICE = "onnxruntime.cpu", "cpu-0123456789abcdef"


@pytest.fixture
def repository(tmp_path: Path) -> FolderRepository:
    return FolderRepository(tmp_path / "repository")


@pytest.fixture
def jobs(repository: FolderRepository) -> Jobs:
    return Jobs(repository)


@pytest.fixture
def selections(repository: FolderRepository) -> Selections:
    return Selections(repository)


def race(manifest: Manifest, now: float = 1.0, device: str = DEVICE) -> Job:
    return new_job(manifest, KIND, device, "cpu", now)


def path_of(tmp_path: Path, one: Job) -> Path:
    return tmp_path / "repository" / "races" / f"{one.model}@{one.version}@{one.key}.json"


def stored(jobs: Jobs, one: Job) -> Job:
    after = jobs.put(one, lambda _: one)
    assert after == one
    return one


def selection(manifest: Manifest, files: tuple[SourceFile, ...] = (), **form: object) -> Selection:
    fields = {"key": "a-1", "target": "a", "folder": "race-1/a-1", "files": files, "backend": "openvino", **form}
    content = content_digest(manifest)
    return Selection(content=content, kind=KIND, device=DEVICE, form=Form.model_validate(fields))


def test_a_race_is_found_by_other_processes(repository: FolderRepository, jobs: Jobs, tmp_path: Path) -> None:
    one = stored(jobs, race(publish(repository, "m", 1)))
    other = Jobs(FolderRepository(tmp_path / "repository"))
    assert other.all() == [one]
    assert other.of("m", 1) == [one]
    assert other.get(one) == one
    assert other.of("m", 2) == []


def test_models_whose_names_begin_alike_have_races_of_their_own(repository: FolderRepository, jobs: Jobs) -> None:
    names = ("m", "m-1", "m.1")
    manifests = [publish(repository, name, version) for name in names for version in (1, 11)]
    for manifest in manifests:
        stored(jobs, race(manifest))
    assert [one.model for one in jobs.of("m", 1)] == ["m"]
    repository.delete_version("m", 1)
    assert {(one.model, one.version) for one in jobs.all()} == {
        (manifest.model, manifest.version) for manifest in manifests[1:]
    }
    repository.delete_model("m-1")
    assert {one.model for one in jobs.all()} == {"m", "m.1"}


def test_a_change_of_a_race_is_seen_without_reading_the_others(repository: FolderRepository, jobs: Jobs) -> None:
    one = stored(jobs, race(publish(repository, "m", 1)))
    two = stored(jobs, race(publish(repository, "n", 1)))
    first = jobs.all()
    jobs.put(one, lambda _: one.ended(RaceState.FAILED, 2.0, "it died"))
    second = {each.model: each for each in jobs.all()}
    assert second["m"].why == "it died"
    assert second["n"] is next(each for each in first if each == two)


def test_a_change_that_gives_nothing_back_writes_nothing(
    repository: FolderRepository, jobs: Jobs, tmp_path: Path
) -> None:
    folder = tmp_path / "repository" / "races"
    one = stored(jobs, race(publish(repository, "m", 1)))
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("*.json"))
    assert jobs.put(one, lambda _: None) == one
    assert jobs.put(one.model_copy(update={"model": "n"}), lambda _: None) is None
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("*.json")) == before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": "m"}', b"\xff" * 100, b"{}" * (3 << 20)])
def test_a_damaged_race_counts_as_none(
    repository: FolderRepository, jobs: Jobs, tmp_path: Path, content: bytes
) -> None:
    one = stored(jobs, race(publish(repository, "m", 1)))
    (path_of(tmp_path, one)).write_bytes(content)
    assert jobs.all() == []
    assert jobs.get(one) is None
    assert stored(jobs, one) == one


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


def test_races_that_cannot_be_listed_do_not_seem_to_be_deleted(repository: FolderRepository, jobs: Jobs) -> None:
    one = stored(jobs, race(publish(repository, "m", 1)))
    with no_descriptors():
        for read in (jobs.all, lambda: jobs.of("m", 1), lambda: jobs.get(one)):
            with pytest.raises(Failure, match="Too many open files"):
                read()
        with pytest.raises(Failure, match="Too many open files"):
            jobs.put(one, lambda _: race(publish(repository, "m", 2)))
    assert jobs.all() == [one]


def test_a_race_that_cannot_be_read_at_present_is_as_it_was_read_last(
    repository: FolderRepository, jobs: Jobs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = stored(jobs, race(publish(repository, "m", 1)))
    other = stored(jobs, race(publish(repository, "n", 1)))
    assert jobs.all() == [one, other]
    path = path_of(tmp_path, one)
    path.rename(path.with_suffix(".away"))
    path.mkdir()  # what root cannot read either
    for _ in range(3):
        assert jobs.all() == [one, other]
    assert len(caplog.records) == 1, "it is said once, not at each look"
    with pytest.raises(Failure, match="Is a directory"):
        jobs.put(one, lambda before: before or race(publish(repository, "m", 2)))
    path.rmdir()
    path.with_suffix(".away").rename(path)
    assert jobs.all() == [one, other]


def test_a_race_of_a_deleted_version_leaves_no_folder_in_the_way_of_the_next_upload(
    repository: FolderRepository,
) -> None:
    manifest = publish(repository, "m", 1)
    repository.delete_model("m")
    with pytest.raises(Failure, match="version 1 of 'm' was deleted"):
        Selections(repository).make_cache(manifest, KIND, DEVICE)
    assert publish(repository, "m", 1) == manifest
    assert Selections(repository).make_cache(manifest, KIND, DEVICE).is_dir()


def test_a_kill_between_the_write_and_the_rename_leaves_the_race_as_it_was(
    repository: FolderRepository, jobs: Jobs, tmp_path: Path
) -> None:
    one = stored(jobs, race(publish(repository, "m", 1)))
    path = path_of(tmp_path, one)
    content = path.read_bytes()
    for length in range(0, len(content), 37):
        path.with_name(path.name + ".new").write_bytes(content[:length])
        assert Jobs(FolderRepository(tmp_path / "repository")).all() == [one]


def test_one_worker_runs_a_race_and_one_race_a_device(repository: FolderRepository, jobs: Jobs) -> None:
    one, other = race(publish(repository, "m", 1)), race(publish(repository, "n", 1))
    locks = jobs.try_locks(one, "host", "cpu")
    assert len(locks) == 2
    assert not jobs.try_locks(one, "other", "cpu"), "the race runs"
    assert not jobs.try_locks(other, "host", "cpu"), "a race runs on the device"
    elsewhere = jobs.try_locks(other, "host", "cuda:0")
    assert elsewhere
    for lock in (*locks, *locks, *elsewhere):
        lock.release()
    assert jobs.try_locks(one, "host", "cpu")


def test_a_race_that_begins_anew_remembers_how_earlier_ones_ended(repository: FolderRepository) -> None:
    one = race(publish(repository, "m", 1))
    for number in range(PAST_MAX + 3):
        report = RaceReport(winner=f"w-{number}", ratio=2.0)
        one = one.ended(RaceState.DECIDED, float(number), report=report)
        one = one.model_copy(update={"undone": RaceUndone(why="slower", at=1.0)})
        one = one.requeued(number + 0.5, RaceOptions(targets=("a",)), "cpu")
        assert (one.state, one.report, one.undone, one.tries) == (RaceState.QUEUED, None, None, 0)
        assert one.options.targets == ("a",)
    assert [past.winner for past in one.past] == [f"w-{number}" for number in range(PAST_MAX + 2, 2, -1)]
    assert one.past[0].why == "slower"
    assert Job.model_validate_json(one.model_dump_json()) == one


def test_races_are_bounded(repository: FolderRepository, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.services.repository.documents.DOCUMENTS_MAX", 3)
    for number in range(1, 6):
        one = race(publish(repository, "m", number))
        stored(jobs, one)
        if number != 2:
            stored(jobs, one.ended(RaceState.DECIDED, float(number)))
    assert {one.version for one in jobs.all()} == {2, 4, 5}


@pytest.mark.parametrize(
    "parts",
    [
        {"report": {"rows": 5}},
        {"report": {"rows": [1]}},
        {"report": {"rows": [{"verdict": "won"}]}},
        {"report": {"ratio": "inf"}},
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
    repository: FolderRepository, jobs: Jobs, tmp_path: Path, parts: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    one = stored(jobs, race(publish(repository, "m", 1)))
    path = path_of(tmp_path, one)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "decided", **parts}))
    for _ in range(3):
        assert jobs.all() == []
    assert len(caplog.records) == 1, "it is said once, not at each look"
    assert jobs.of("m", 1) == []
    assert stored(jobs, one) == one


def test_documents_of_an_earlier_release_are_read(repository: FolderRepository, jobs: Jobs, tmp_path: Path) -> None:
    """One that ended with a verdict stays readable; what waited is queued, what was unfinished failed."""
    row = {"target": "a", "candidate": "a-1", "verdict": "won", "ratio": 2.0, "ratio_low": 1.9, "late": False}
    row |= {"ratios": {"1": [2.0, 1.9, 2.1]}, "estimate_s": 3.0}
    report = {"baseline": "b", "winner": "a-1", "ratio": 2.0, "table": {"1": "a-1"}, "rows": [row], "weights": {"1": 1}}
    one = stored(jobs, race(publish(repository, "m", 1)))
    for before, now in (("decided", "decided"), ("waiting", "queued"), ("unfinished", "failed")):
        options = {"seconds": 30.0, "gate": {"cosine_min": 0.9, "agreement_min": 0.9, "metric": "cosine > 0.5"}}
        document = json.loads(path_of(tmp_path, one).read_text())
        document |= {"state": before, "options": options, "rows": {"4": 1.0}, "unfinished": 1, "trials": [{}]}
        document |= {"report": report if before == "decided" else None}
        path_of(tmp_path, one).write_text(json.dumps(document))
        [found] = jobs.all()
        assert (found.state, found.options.gate.cosine_min) == (now, 0.9)
        assert found.winner == ("a-1" if before == "decided" else None)
        if found.report is not None:
            assert found.report.rows[0].ratios == {1: 2.0}


def test_a_selection_is_read_as_it_was_written_and_goes_with_its_version(
    repository: FolderRepository, selections: Selections, tmp_path: Path
) -> None:
    manifest = publish(repository, "m", 1)
    assert selections.get(manifest, KIND, DEVICE) is None
    for one in (selection(manifest), selection(manifest, single=True, bounds={"x": (-1.0, 1.0)})):
        assert not selections.put(manifest, KIND, DEVICE, one)
        assert selections.get(manifest, KIND, DEVICE) == one
        assert selections.get(manifest, "openvino.cpu", DEVICE) is None
        assert selections.get(manifest, KIND, "another device") is None
        assert selections.get(manifest.model_copy(update={"digest": "0" * 64}), KIND, DEVICE) is None
        assert selections.put(manifest, KIND, DEVICE, None)
    assert not selections.put(manifest, KIND, DEVICE, None)
    selections.put(manifest, KIND, DEVICE, selection(manifest))
    repository.delete_version("m", 1)
    assert selections.get(manifest, KIND, DEVICE) is None
    with pytest.raises(Failure, match="deleted"):
        selections.put(manifest, KIND, DEVICE, selection(manifest))
    assert not (tmp_path / "repository" / "models" / "m" / "1").exists()


def changed(selections: Selections, manifest: Manifest, parts: dict[str, object]) -> None:
    selections.put(manifest, KIND, DEVICE, selection(manifest))
    [path] = selections.compiled(manifest).glob("choice-*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))


@pytest.mark.parametrize(
    ("table", "serves"),
    [
        ({"16": "a-1"}, "a-1"),
        ({"1": "b-2", "4": "a-1", "16": "a-1"}, "a-1"),
        ({"1": "b-2", "4": BASELINE}, "b-2"),
        ({"1": "b-2", "4": BASELINE, "16": BASELINE}, None),
    ],
)
def test_of_a_table_of_an_earlier_release_the_form_of_most_runs_serves(
    repository: FolderRepository, selections: Selections, table: dict[str, str], serves: str | None
) -> None:
    manifest = publish(repository, "m", 1)
    other = {"key": "b-2", "target": "b", "backend": "openvino"}
    first = selection(manifest).form.model_dump(mode="json")
    changed(selections, manifest, {"table": table, "variants": [first, other]})
    found = selections.get(manifest, KIND, DEVICE)
    assert (found.form.key if found is not None else None) == serves


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b" " * (2 << 20)])
def test_a_damaged_selection_is_not_followed(
    repository: FolderRepository, selections: Selections, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = publish(repository, "m", 1)
    selections.put(manifest, KIND, DEVICE, selection(manifest))
    [path] = selections.compiled(manifest).glob("choice-*.json")
    path.write_bytes(content)
    for _ in range(3):
        assert selections.get(manifest, KIND, DEVICE) is None
    assert len(caplog.records) == 1, "it is said once, not at each look"


@pytest.mark.parametrize(
    "parts",
    [{"table": {"16": "another"}}, {"table": 5}, {"variants": [{"key": {}}]}, {"variants": []}, {"variants": 7}],
)
def test_a_selection_whose_table_does_not_fit_is_not_followed(
    repository: FolderRepository, selections: Selections, parts: dict[str, object]
) -> None:
    manifest = publish(repository, "m", 1)
    changed(selections, manifest, parts)
    assert selections.get(manifest, KIND, DEVICE) is None


def test_a_damaged_form_is_an_error_and_never_loaded(
    repository: FolderRepository, selections: Selections, tmp_path: Path
) -> None:
    manifest = publish(repository, "m", 1)
    folder = selections.compiled(manifest) / "race-1" / "a-1"
    folder.mkdir(parents=True)
    (folder / "a.onnx").write_bytes(b"abc")
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    good = selection(manifest, (SourceFile(path="a.onnx", size_bytes=3, sha256=sha256),)).form
    own = tmp_path / "own.onnx"
    assert selections.file(manifest, good, own) == folder / "a.onnx"
    assert selections.file(manifest, good.model_copy(update={"files": ()}), own) == own
    (folder / "a.onnx").write_bytes(b"abd")
    with pytest.raises(Failure, match="sha256 differs"):
        selections.file(manifest, good, own)
    (folder / "a.onnx").unlink()
    with pytest.raises(Failure, match=r"a\.onnx cannot be read"):
        selections.file(manifest, good, own)
    outside = good.model_copy(update={"folder": "../../../.."})
    with pytest.raises(Failure, match="not in the form's folder"):
        selections.file(manifest, outside, own)


def test_folders_of_losers_are_deleted(repository: FolderRepository, selections: Selections) -> None:
    manifest = publish(repository, "m", 1)
    cache = selections.cache(manifest, KIND, DEVICE)
    for name in ("a-1", "b-2", "c-3"):
        (cache / name).mkdir(parents=True)
        (cache / name / "model").write_bytes(b"x")
    selections.sweep(manifest, KIND, DEVICE, "b-2")
    assert [path.name for path in cache.iterdir()] == ["b-2"]


def test_rows_that_an_earlier_release_captured_are_deleted_and_its_setting_is_read(
    repository: FolderRepository, tmp_path: Path
) -> None:
    manifest = publish(repository, "m", 1)
    folder = repository.variants.compiled(manifest).parent / "race"
    folder.mkdir()
    for name in ("captured.npz", "uploaded.npz", ".new-1"):
        (folder / name).write_bytes(b"x")
    sweep_samples(repository)
    assert sorted(path.name for path in folder.iterdir()) == [".new-1", "uploaded.npz"], "a write may be in progress"
    assert find_samples(repository, manifest) == folder / "uploaded.npz"
    path = tmp_path / "repository" / "models" / "m" / "endpoint.json"
    path.write_text(json.dumps({"model": "m", "placement": {"capture_samples": 16, "pin": True}}))
    assert repository.endpoint("m").placement.pin
    with pytest.raises(Failure, match="live requests are no longer captured"):
        changed_settings(repository.endpoint("m").placement, {"capture_samples": 4}, ())
