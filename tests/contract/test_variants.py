"""What was compiled from a version is kept with it, and used only for what it was made from and for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from millstream.services.errors import Failure
from millstream.services.model.manifest import Manifest, ModelConfig, SourceFile
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.variants import REPORT, VARIANTS_MAX, Report, Target, Variants
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Stop
from millstream.workers.models import load_version
from millstream.workers.models.load_version import LoadEnvironment, load
from millstream.workers.variants.compile import difference, make
from tests.contract.backend_cases import signature
from tests.kit import models
from tests.kit.versions import publish_content

MLP = signature([("input", "FP32", (-1, 64))], [("output", "FP32", (-1, 10))])
HERE = Target("onnxruntime-cpu", "onnxruntime 1", "x86_64 1")
EMPTY = Report(digest="", target="", runtime="", device="")
BACKENDS = ["onnxruntime", "openvino"]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderRepository:
    monkeypatch.setattr(load_version, "COMPILE_BYTES_MIN", 1)
    repository = FolderRepository(tmp_path / "repository")
    content = models.mlp(tmp_path / "mlp.onnx").read_bytes()
    publish_content(repository, "mlp", content, "onnx", MLP, ModelConfig())
    return repository


def manifest(repository: FolderRepository) -> Manifest:
    return repository.manifest("mlp", 1)


def keep(variants: Variants, of: Manifest, target: Target, content: bytes = b"compiled") -> bool:
    with variants.making(of) as folder:
        (folder / "model").write_bytes(content)
        made = EMPTY.model_copy(update={"files": (SourceFile(path="model", size_bytes=0, sha256=""),)})
        return variants.keep(of, target, folder, made)


def compiled(repository: FolderRepository) -> list[str]:
    return sorted(path.name for path in (repository.local_path("mlp", 1) / "compiled").iterdir() if path.is_dir())


def test_a_variant_is_found_for_its_target_alone(repository: FolderRepository) -> None:
    variants, of = repository.variants, manifest(repository)
    assert variants.find(of, HERE) is None
    assert keep(variants, of, HERE)
    found = variants.find(of, HERE)
    assert found is not None
    assert found.read_bytes() == b"compiled"
    assert found.is_relative_to(repository.local_path("mlp", 1) / "compiled")
    for other in (HERE._replace(name="openvino-cpu"), HERE._replace(runtime="2"), HERE._replace(device="aarch64 1")):
        assert variants.find(of, other) is None
    assert variants.find(of.model_copy(update={"digest": "0" * 64}), HERE) is None


def test_the_second_to_finish_changes_nothing(repository: FolderRepository) -> None:
    variants, of = repository.variants, manifest(repository)
    assert keep(variants, of, HERE, b"first")
    assert not keep(variants, of, HERE, b"second")
    found = variants.find(of, HERE)
    assert found is not None
    assert found.read_bytes() == b"first"
    assert len(compiled(repository)) == 1


@pytest.mark.parametrize("damage", ["bytes", "missing", "report", "foreign", "outside"])
def test_a_damaged_or_foreign_variant_is_ignored_and_deleted(repository: FolderRepository, damage: str) -> None:
    variants, of = repository.variants, manifest(repository)
    keep(variants, of, HERE)
    folder = variants.folder(of, HERE)
    report = json.loads((folder / REPORT).read_text())
    if damage == "bytes":
        (folder / "model").write_bytes(b"COMPILED")
    elif damage == "missing":
        (folder / "model").unlink()
    elif damage == "report":
        (folder / REPORT).write_text("{")
    elif damage == "foreign":
        (folder / REPORT).write_text(json.dumps({**report, "device": "another"}))
    else:
        (folder.parent / "else").write_bytes(b"compiled")
        (folder / REPORT).write_text(json.dumps({**report, "files": [{**report["files"][0], "path": "../else"}]}))
    assert variants.find(of, HERE) is None
    assert not folder.exists()
    assert keep(variants, of, HERE)


def test_what_is_not_finished_leaves_nothing(repository: FolderRepository) -> None:
    variants, of = repository.variants, manifest(repository)
    with pytest.raises(ZeroDivisionError), variants.making(of) as folder:
        (folder / "model").write_bytes(b"half")
        raise ZeroDivisionError
    assert compiled(repository) == []


def test_what_a_killed_process_left_is_deleted_later(repository: FolderRepository) -> None:
    variants, of = repository.variants, manifest(repository)
    with variants.making(of) as one, variants.making(of) as other:
        os.utime(one, (1, 1))
        with variants.making(of):
            assert not one.exists()
            assert other.exists()


def test_the_oldest_beyond_the_limit_are_deleted(repository: FolderRepository) -> None:
    variants, of = repository.variants, manifest(repository)
    targets = [HERE._replace(runtime=str(number)) for number in range(VARIANTS_MAX + 2)]
    for target in targets:
        keep(variants, of, target)
    assert len(compiled(repository)) == VARIANTS_MAX
    assert variants.find(of, targets[-1]) is not None


def test_variants_go_with_their_version(repository: FolderRepository) -> None:
    variants, of = repository.variants, manifest(repository)
    keep(variants, of, HERE)
    repository.delete_version("mlp", 1)
    assert variants.find(of, HERE) is None
    with pytest.raises(Failure), variants.making(of):
        pass


@pytest.mark.plugins
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_version_is_loaded_and_answers_the_same(repository: FolderRepository, backend: str) -> None:
    of, library = manifest(repository), get_backend(backend)
    folder = repository.folder_of(of)
    at = LoadEnvironment(library, backend, "cpu", 1, variants=repository.variants)
    before = load(of, folder, at, Stop())
    assert make(repository, of, library, "cpu", 1) == 0
    after = load(of, folder, at, Stop())
    assert (before.compiled, after.compiled) == (False, True)
    given = {"input": np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)}
    np.testing.assert_array_equal(after.instance.run(given)[0], before.instance.run(given)[0])
    target = library.target("cpu")
    assert target is not None
    report = repository.variants.report(of, target)
    assert report is not None
    assert (report.refused, report.runtime, report.seconds > 0) == ("", target.runtime, True)


@pytest.mark.plugins
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_variant_that_cannot_be_loaded_is_deleted_and_the_version_serves(
    repository: FolderRepository, backend: str
) -> None:
    of, library = manifest(repository), get_backend(backend)
    make(repository, of, library, "cpu", 1)
    target = library.target("cpu")
    assert target is not None
    report = repository.variants.report(of, target)
    assert report is not None
    folder = repository.variants.folder(of, target)
    repository.variants.discard(of, target, "a test")
    with repository.variants.making(of) as new:
        (new / report.files[0].path).write_bytes(b"another compilation")
        repository.variants.keep(of, target, new, report)
    at = LoadEnvironment(library, backend, "cpu", 1, variants=repository.variants)
    loaded = load(of, repository.folder_of(of), at, Stop())
    assert loaded.instance.run({"input": np.ones((1, 64), np.float32)})[0].shape == (1, 10)
    assert not folder.exists()


def test_a_compiled_model_with_other_outputs_is_refused(tmp_path: Path) -> None:
    column = signature([("x", "FP32", (-1, 2))], [("y", "FP32", (-1, 2))])
    library = get_backend("onnxruntime")
    one, other = models.scale(tmp_path / "2.onnx", 2.0), models.scale(tmp_path / "3.onnx", 2.000001)
    assert difference(column, library, one, one, "cpu") == ""
    assert "output 'y' differs" in difference(column, library, one, other, "cpu")


def test_small_versions_and_other_formats_are_not_compiled(tmp_path: Path) -> None:
    repository = FolderRepository(tmp_path / "repository")
    content = models.mlp(tmp_path / "mlp.onnx").read_bytes()
    of = publish_content(repository, "mlp", content, "onnx", MLP, ModelConfig())
    large = of.model_copy(update={"files": (SourceFile(path="source/model.onnx", size_bytes=1 << 28, sha256=""),)})
    assert not load_version.pays_to_compile(of)
    assert load_version.pays_to_compile(large)
    assert not load_version.pays_to_compile(large.model_copy(update={"source_format": "torch-export"}))
