"""What instances take is kept with the repository, and predicted for versions that were never loaded."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from millstream.services.model.manifest import Manifest, SourceFile
from millstream.services.placement.prediction import ASSUMED_RATIOS, LOAD_S_FIXED_MAX, LOAD_S_PER_BYTE_MAX
from millstream.services.placement.views import Footprint
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.footprints import DOCUMENT_BYTES_MAX, FILES_MAX, KINDS_MAX, Measured
from millstream.services.wire.records import kind_of
from tests.contract.repositories import publish

MIB = 1 << 20
CPU = kind_of("onnxruntime", "cpu")


@pytest.fixture
def repository(tmp_path: Path) -> FolderRepository:
    repository = FolderRepository(tmp_path / "repository")
    publish(repository)
    return repository


def known(repository: FolderRepository) -> Manifest:
    return repository.manifest("digits", 1)


def file_of(repository: FolderRepository) -> Path:
    [path] = (repository.verdicts._root / "footprints" / "digits").iterdir()
    return path


def version_of(path: Path) -> tuple[int, int, int]:
    """Return what changes when a file is written, and not, as its time of access, when it is read."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def took(resident: int, peak: int = 0, *, disturbed: bool = False, measured: bool = True) -> Measured:
    return Measured(resident_bytes=resident, peak_bytes=peak, load_s=0.5, disturbed=disturbed, measured=measured)


def test_it_is_kept_for_each_kind_and_other_processes_see_it(repository: FolderRepository) -> None:
    manifest, other = known(repository), FolderRepository(repository.verdicts._root)
    assert not other.footprints.of(manifest, CPU).measured
    repository.footprints.write(manifest, CPU, took(7 * MIB, MIB))
    repository.footprints.write(manifest, "onnxruntime.cuda", took(9 * MIB))
    for one in (repository, other, FolderRepository(repository.verdicts._root)):
        assert one.footprints.of(manifest, CPU) == Footprint(7 * MIB, MIB, 0.5, measured=True)
        assert one.footprints.of(manifest, "onnxruntime.cuda").resident_bytes == 9 * MIB
        assert not one.footprints.of(manifest, "openvino.cpu").measured
    repository.footprints.write(manifest, CPU, took(8 * MIB))
    assert other.footprints.of(manifest, CPU).resident_bytes == 8 * MIB


def test_kinds_are_of_a_backend_and_a_kind_of_device() -> None:
    assert kind_of("onnxruntime", "cuda:3") == "onnxruntime.cuda"
    assert kind_of("openvino", "cpu") == "openvino.cpu"


def test_nothing_is_read_again_because_of_it(repository: FolderRepository) -> None:
    token, stamp = repository.token(), repository.stamp("digits")
    repository.footprints.write(known(repository), CPU, took(MIB))
    assert repository.token() == token
    while not isinstance(stamp, tuple) or any("just now" in str(part) for part in stamp):
        stamp = repository.stamp("digits")  # until its files count as settled
    repository.footprints.write(known(repository), CPU, took(2 * MIB))
    assert repository.stamp("digits") == stamp


def test_runs_of_others_only_add(repository: FolderRepository) -> None:
    manifest, footprints = known(repository), repository.footprints
    footprints.write(manifest, CPU, took(12 * MIB, 5 * MIB, disturbed=True))
    footprints.write(manifest, CPU, took(8 * MIB, 6 * MIB, disturbed=True))
    assert footprints.of(manifest, CPU) == Footprint(8 * MIB, 5 * MIB, 0.5, measured=True)
    footprints.write(manifest, CPU, took(10 * MIB, 6 * MIB))
    assert footprints.of(manifest, CPU).resident_bytes == 10 * MIB  # measured without them
    footprints.write(manifest, CPU, took(3 * MIB, 30 * MIB, disturbed=True))
    assert footprints.of(manifest, CPU) == Footprint(10 * MIB, 6 * MIB, 0.5, measured=True)


def test_after_a_load_without_memory_the_next_reserves_more(repository: FolderRepository) -> None:
    manifest, footprints = known(repository), repository.footprints
    footprints.write(manifest, CPU, took(100 * MIB, 50 * MIB, measured=False))
    assert footprints.of(manifest, CPU) == Footprint(100 * MIB, 50 * MIB, 0.5)
    footprints.write(manifest, CPU, took(1, measured=False))
    assert footprints.of(manifest, CPU).load_bytes > 1  # not below the prediction


def test_alike_measurements_are_not_written_again(repository: FolderRepository) -> None:
    manifest, footprints = known(repository), repository.footprints
    footprints.write(manifest, CPU, took(100 * MIB, 50 * MIB))
    before = version_of(file_of(repository))
    assert footprints.write(manifest, CPU, took(110 * MIB, 45 * MIB)).resident_bytes == 100 * MIB
    assert version_of(file_of(repository)) == before
    footprints.write(manifest, CPU, took(150 * MIB, 50 * MIB))
    assert footprints.of(manifest, CPU).resident_bytes == 150 * MIB
    assert len(list(file_of(repository).parent.iterdir())) == 1


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"onnxruntime.cpu": {"resident_bytes": -1}}', b" " * (1 << 20)])
def test_a_damaged_file_counts_as_not_measured(
    repository: FolderRepository, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = known(repository)
    repository.footprints.write(manifest, CPU, took(MIB))
    file_of(repository).write_bytes(damage[: DOCUMENT_BYTES_MAX + 1])
    again = FolderRepository(repository.verdicts._root).footprints
    assert not again.of(manifest, CPU).measured
    assert "counts as none" in caplog.text
    again.write(manifest, CPU, took(2 * MIB))
    assert again.of(manifest, CPU).resident_bytes == 2 * MIB


@pytest.mark.parametrize("place", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_not_opened(repository: FolderRepository, place: object) -> None:
    manifest = known(repository)
    repository.footprints.write(manifest, CPU, took(MIB))
    path = file_of(repository)
    path.unlink()
    place(path)  # type: ignore[operator]
    assert not FolderRepository(repository.verdicts._root).footprints.of(manifest, CPU).measured


def test_it_goes_with_the_version_and_with_the_model(repository: FolderRepository) -> None:
    manifest = known(repository)
    folder = repository.verdicts._root / "footprints" / "digits"
    publish(repository, version=2)
    repository.footprints.write(manifest, CPU, took(MIB))
    repository.footprints.write(repository.manifest("digits", 2), CPU, took(MIB))
    repository.delete_version("digits", 1)
    assert [path.name.partition("-")[0] for path in folder.iterdir()] == ["2"]
    repository.delete_model("digits")
    assert not folder.exists()
    repository.footprints.write(manifest, CPU, took(MIB))  # by a worker that had not noticed
    assert not folder.exists()


def test_it_is_bounded(repository: FolderRepository) -> None:
    manifest, footprints = known(repository), repository.footprints
    for number in range(KINDS_MAX + 3):
        footprints.write(manifest, f"kind-{number}", took(MIB))
    assert not footprints.of(manifest, "kind-0").measured
    assert footprints.of(manifest, f"kind-{KINDS_MAX + 2}").measured
    for number in range(FILES_MAX + 3):
        footprints.write(manifest.model_copy(update={"opset": number}), CPU, took(MIB))
    assert len(list((repository.verdicts._root / "footprints" / "digits").iterdir())) == FILES_MAX


def sized(repository: FolderRepository, size: int, number: int) -> Manifest:
    """Return a version with a file of a size, and content of its own."""
    file = SourceFile(path="source/model.onnx", size_bytes=size, sha256="0" * 64)
    return known(repository).model_copy(update={"files": (file,), "opset": number, "digest": f"{number:08x}" * 8})


def test_unknown_versions_are_predicted_from_measured_ones(repository: FolderRepository) -> None:
    of_size = partial(sized, repository)
    footprints, unseen = repository.footprints, of_size(100 * MIB, 1000)
    assert footprints.of(unseen, CPU) == ASSUMED_RATIOS.predict(100 * MIB)
    for number in range(60):
        footprints.write(of_size(10 * MIB, number), CPU, took(4 * MIB + 20 * MIB, 4 * MIB + 5 * MIB))
    for number in range(60, 120):
        footprints.write(of_size(1000, number), CPU, took(MIB, 2 * MIB))
    assert footprints.of(of_size(1000, 2000), CPU).resident_bytes // MIB == 1
    assert footprints.of(unseen, CPU).resident_bytes == pytest.approx((10 * 23 + 1) * MIB, rel=0.01)
    assert footprints.of(unseen, CPU).peak_bytes == pytest.approx((10 * 7 + 2) * MIB, rel=0.01)
    assert footprints.of(unseen, "openvino.cpu") == ASSUMED_RATIOS.predict(100 * MIB)


def took_s(load_s: float) -> Measured:
    return Measured(resident_bytes=30 * MIB, peak_bytes=5 * MIB, load_s=load_s)


@pytest.mark.parametrize("size", [1000, 300 << 10, 15 * MIB])
@pytest.mark.parametrize("number", [1, 3, 60])
def test_small_slow_models_do_not_make_large_ones_slow(repository: FolderRepository, size: int, number: int) -> None:
    footprints, large = repository.footprints, sized(repository, 288 * MIB, 1000)
    assumed = footprints.of(large, CPU).load_s
    for at in range(number):
        footprints.write(sized(repository, size, at), CPU, took_s(600.0))
    assert footprints.of(large, CPU).load_s <= assumed + LOAD_S_FIXED_MAX
    for at in range(number, 2 * number + 2):
        footprints.write(sized(repository, 32 * MIB, at), CPU, took_s(600.0))
    assert footprints.of(large, CPU).load_s <= LOAD_S_FIXED_MAX + LOAD_S_PER_BYTE_MAX * 288 * MIB


def test_a_format_is_predicted_from_its_own_versions(repository: FolderRepository) -> None:
    footprints, onnx = repository.footprints, sized(repository, 10 * MIB, 1000)
    before = footprints.of(onnx, CPU)
    for at in range(30):
        slow = sized(repository, 10 * MIB, at).model_copy(update={"source_format": "python"})
        footprints.write(slow, CPU, took_s(20.0))
    assert footprints.of(onnx, CPU) == before
    python = sized(repository, 10 * MIB, 1001).model_copy(update={"source_format": "python"})
    assert footprints.of(python, CPU).load_s >= 20.0


def test_seconds_that_were_measured_count_whatever_is_known_of_the_bytes(repository: FolderRepository) -> None:
    manifest, footprints = known(repository), repository.footprints
    seconds_only = Measured(resident_bytes=0, load_s=3.4, measured=False)
    predicted = footprints.of(manifest, CPU)
    footprints.write(manifest, CPU, seconds_only)
    assert footprints.of(manifest, CPU) == replace(predicted, load_s=3.4)
    too_little = Measured(resident_bytes=100 * MIB, peak_bytes=50 * MIB, measured=False)
    footprints.write(manifest, CPU, too_little)
    assert footprints.of(manifest, CPU) == Footprint(100 * MIB, 50 * MIB, 3.4)
    footprints.write(manifest, CPU, seconds_only.model_copy(update={"load_s": 9.0}))
    assert footprints.of(manifest, CPU) == Footprint(100 * MIB, 50 * MIB, 9.0)
    footprints.write(manifest, CPU, took(7 * MIB, MIB))
    footprints.write(manifest, CPU, seconds_only)
    assert footprints.of(manifest, CPU) == Footprint(7 * MIB, MIB, 3.4, measured=True)


def test_a_process_that_has_just_started_predicts_from_what_others_measured(repository: FolderRepository) -> None:
    manifests = [sized(repository, 10 * MIB, number) for number in range(30)]
    for manifest in manifests:
        repository.footprints.write(manifest, CPU, took(30 * MIB, 5 * MIB))
    unknown = sized(repository, 20 * MIB, 99)
    started = FolderRepository(repository.verdicts._root)
    assert started.footprints.ratios(CPU) is ASSUMED_RATIOS
    started.footprints.learn(manifests)
    assert started.footprints.of(unknown, CPU) == repository.footprints.of(unknown, CPU)
    assert started.footprints.of(unknown, CPU) != ASSUMED_RATIOS.predict(20 * MIB)
