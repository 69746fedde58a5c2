"""Which files other servers' archives and folders serve, and what of them is refused, without any framework."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from millstream.plugins.convert.keras import KerasImporter, check_config
from millstream.plugins.convert.mlserver import MLServerImporter
from millstream.plugins.convert.tensorflow import VersionedFolderImporter
from millstream.plugins.convert.torchserve import TorchServeImporter
from millstream.services.errors import Failure
from millstream.services.ingest.importers import ImportOptions, Source, read_inputs


def staged(folder: Path) -> Source:
    (folder / "source").mkdir(exist_ok=True)
    return Source(folder, folder / "source")


def unpacked(folder: Path, manifest: Any, **members: bytes) -> Source:
    path = staged(folder).path
    (path / "MAR-INF").mkdir()
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    (path / "MAR-INF" / "MANIFEST.json").write_text(text)
    for name, content in members.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return Source(folder, path)


@pytest.mark.parametrize(
    ("manifest", "members", "said"),
    [
        ("{", {}, "is not JSON"),
        ({"model": []}, {}, "cannot be read"),
        ({"model": {"handler": "h.py"}}, {}, "no serializedFile"),
        ({"model": {"serializedFile": "m.pt"}}, {}, "does not have"),
        ({"model": {"serializedFile": "m.pt", "modelFile": "model.py"}}, {"m.pt": b""}, "torch.export.save"),
        ({"model": {"serializedFile": "../m.pt"}}, {}, "leads out"),
        ({"model": {"serializedFile": "a/m.pt"}}, {"a/m.pt": b""}, "not a file at its top"),
        (
            {"model": {"handler": "h.py", "serializedFile": "m.pt"}},
            {"h.py": b"", "m.pt": b""},
            "answers by its handler",
        ),
        ({"model": {"handler": "a/h:f", "serializedFile": "m.pt"}}, {"h.py": b""}, "answers by its handler"),
    ],
)
def test_archives_of_torchserve_that_are_refused(
    tmp_path: Path, manifest: Any, members: dict[str, bytes], said: str
) -> None:
    source = unpacked(tmp_path, manifest, **members)
    importer = TorchServeImporter()
    assert importer.recognises(source)
    with pytest.raises(Failure, match=said):
        importer.convert(source, ImportOptions())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "not a JSON object"),
        ({"implementation": "my.Model"}, "'my.Model' is a class in Python"),
        ({}, "a class in Python"),
        ({"implementation": "mlserver_sklearn.SKLearnModel"}, "has no model.joblib"),
        ({"implementation": "mlserver_sklearn.SKLearnModel", "parameters": {"uri": "s3://a/b"}}, "copy the model"),
        ({"implementation": "mlserver_sklearn.SKLearnModel", "parameters": {"uri": "../../b"}}, "leads out"),
        ({"implementation": "mlserver_sklearn.SKLearnModel", "parameters": []}, "no object|has no model"),
        ({"implementation": "mlserver_xgboost.XGBoostModel", "parameters": {"uri": "./m.ubj"}}, "has no m.ubj"),
    ],
)
def test_folders_of_mlserver_that_are_refused(tmp_path: Path, settings: Any, said: str) -> None:
    source = staged(tmp_path)
    (source.path / "model-settings.json").write_text(json.dumps(settings))
    importer = MLServerImporter()
    assert importer.recognises(source)
    with pytest.raises(Failure, match=said):
        importer.convert(source, ImportOptions())


def test_versions_are_numbers_that_hold_models(tmp_path: Path) -> None:
    source = staged(tmp_path)
    importer = VersionedFolderImporter()
    assert not importer.recognises(source)
    for name in ("2", "10"):
        (source.path / name).mkdir()
        (source.path / name / "saved_model.pb").write_bytes(b"")
    assert importer.recognises(source)
    (source.path / "config.pbtxt").write_text("")
    assert not importer.recognises(source)


@pytest.mark.parametrize(
    "entry",
    [
        {"class_name": "Lambda", "module": "keras.layers", "config": {}},
        {"class_name": "__lambda__", "config": {"code": "4wAA"}},
    ],
)
def test_lambda_layers_of_keras_are_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(Failure, match="Lambda layer"):
        check_config({"class_name": "Functional", "module": "keras.src.models", "config": {"layers": [{"a": [entry]}]}})


def test_classes_that_are_not_of_keras_are_named() -> None:
    entry = {"class_name": "Mine", "module": "package.layers", "registered_name": "mine>Mine", "config": {}}
    with pytest.raises(Failure, match="'mine>Mine' is a class of your own"):
        check_config({"config": {"layers": [entry]}})
    check_config({"class_name": "Dense", "module": "keras.layers", "registered_name": None, "config": {}})


def test_damaged_files_of_keras_are_refused(tmp_path: Path) -> None:
    source = Source(tmp_path, staged(tmp_path).path / "model")
    with zipfile.ZipFile(source.path, "w") as file:
        file.writestr("config.json", "{")
        file.writestr("model.weights.h5", b"")
    assert KerasImporter().recognises(source)
    with pytest.raises(Failure, match="damaged"):
        KerasImporter().convert(source, ImportOptions())


def test_declared_inputs() -> None:
    assert read_inputs(["x:FP32:-1,3,224", "ids:INT64:-1,-1"]) == (
        ("x", "FP32", (-1, 3, 224)),
        ("ids", "INT64", (-1, -1)),
    )
    for text in ("x", "x:FP32", "x:FP32:", "x:FP32:a", "x:FP32:0", "x:FP32:-2", ":FP32:1", "x:BYTES:1", "x:fp32:1"):
        with pytest.raises(Failure, match=r"an example: x:FP32:-1,3,224,224"):
            read_inputs([text])
    with pytest.raises(Failure, match="twice"):
        read_inputs(["x:FP32:1", "x:FP32:1"])
