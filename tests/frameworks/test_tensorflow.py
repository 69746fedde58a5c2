"""TensorFlow SavedModels and TensorFlow Lite models are converted, and answer as TensorFlow does."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from millstream.plugins.convert import tensorflow as importer
from millstream.plugins.convert.base import Imported
from millstream.plugins.convert.tensorflow import SavedModelImporter, TensorFlowLiteImporter
from millstream.services.errors import Code, Failure
from millstream.services.ingest.check_process import check_in_place
from millstream.services.ingest.importers import ImportOptions, Source
from millstream.services.settings import Settings
from millstream.workers.backends import get_backend
from tests.kit import tensorflow_models

pytestmark = pytest.mark.frameworks

IMAGES = np.random.default_rng(3).standard_normal((3, 16, 16, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tensorflow_models.cnn(tmp_path_factory.mktemp("saved") / "cnn")


@pytest.fixture(scope="module")
def lite(saved: Path) -> Path:
    return tensorflow_models.lite(saved, saved.with_name("cnn.tflite"))


def source_of(folder: Path, uploaded: Path) -> Source:
    """Return a staging folder with the uploaded file or folder."""
    place = folder / "source"
    if uploaded.is_dir():
        shutil.copytree(uploaded, place)
        return Source(folder, place)
    place.mkdir()
    return Source(folder, Path(shutil.copy(uploaded, place / "model.onnx")))


def convert(folder: Path, uploaded: Path) -> Imported:
    source = source_of(folder, uploaded)
    (one,) = [kind for kind in (SavedModelImporter(), TensorFlowLiteImporter()) if kind.recognises(source)]
    return one.convert(source, ImportOptions())


def run(imported: Imported, inputs: dict[str, Any]) -> dict[str, Any]:
    if imported.format == "onnx":
        session = onnxruntime.InferenceSession(imported.path)
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, inputs), strict=True))
    import openvino

    compiled = openvino.Core().compile_model(str(imported.path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = compiled(inputs)
    return {port.get_any_name(): np.array(found[port]) for port in compiled.outputs}


@pytest.fixture(params=["tf2onnx", "openvino"])
def with_converter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "openvino":  # as where TensorFlow is not installed
        monkeypatch.setattr(importer, "needed_modules", lambda: ("openvino",))
    return str(request.param)


@pytest.mark.parametrize("form", ["saved", "lite"])
def test_a_converted_model_answers_as_tensorflow_does(
    request: pytest.FixtureRequest, tmp_path: Path, saved: Path, with_converter: str, form: str
) -> None:
    imported = convert(tmp_path, request.getfixturevalue(form))
    assert imported.format == ("onnx" if with_converter == "tf2onnx" else "openvino")
    wanted = tensorflow_models.answer(saved, image=IMAGES)
    found = run(imported, {"image": IMAGES})
    assert set(found) == {"scores", "label"}
    np.testing.assert_allclose(found["scores"], wanted["scores"], rtol=1e-4, atol=1e-6)
    assert found["label"].tolist() == wanted["label"].tolist()
    sample = imported.samples[0]
    mine = run(imported, dict(sample.inputs))
    np.testing.assert_allclose(mine["scores"], sample.outputs["scores"], rtol=1e-4, atol=1e-6)
    assert any("not compared" in note for note in imported.notes) == (with_converter == "openvino")


def test_serving_default_is_served_of_several_signatures(tmp_path: Path) -> None:
    import tensorflow as tf

    double = tf.function(lambda x: {"y": 2 * x}, input_signature=[tf.TensorSpec([None], tf.float32, name="x")])
    imported = convert(tmp_path, tensorflow_models.cnn(tmp_path / "model", double=double))
    assert set(run(imported, {"image": IMAGES})) == {"scores", "label"}


def test_a_signature_of_another_name_is_served(tmp_path: Path) -> None:
    folder = tensorflow_models.one_function(tmp_path / "m", lambda x: {"y": x + 1}, "float32", [None, 2], "predict")
    assert run(convert(tmp_path, folder), {"x": np.ones((3, 2), np.float32)})["y"].tolist() == [[2, 2]] * 3


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        pytest.param("variables/variables.data-00000-of-00001", "cannot load the SavedModel", id="truncated weights"),
        pytest.param("variables/variables.index", "cannot load the SavedModel", id="truncated index"),
        pytest.param("saved_model.pb", "cannot load the SavedModel", id="truncated document"),
    ],
)
def test_truncated_files_are_refused(tmp_path: Path, saved: Path, damage: str, says: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(saved, broken)
    content = (broken / damage).read_bytes()
    (broken / damage).write_bytes(content[: len(content) // 2])
    with pytest.raises(Failure, match=says) as caught:
        convert(tmp_path, broken)
    assert caught.value.code is Code.INVALID
    assert "\n" not in caught.value.message
    assert str(tmp_path) not in caught.value.message


def test_a_model_of_strange_operators_is_refused_with_their_names(tmp_path: Path) -> None:
    import tensorflow as tf

    folder = tensorflow_models.one_function(
        tmp_path / "m", lambda x: {"y": tf.math.betainc(x, x, x)}, "float32", [None, 2], "serving_default"
    )
    with pytest.raises(Failure, match="Betainc"):
        convert(tmp_path, folder)


def test_a_lite_model_with_operators_of_tensorflow_is_refused(tmp_path: Path) -> None:
    import tensorflow as tf

    folder = tensorflow_models.one_function(
        tmp_path / "m", lambda x: {"y": tf.linalg.inv(x)}, "float32", [2, 2], "serving_default"
    )
    path = tensorflow_models.lite(folder, tmp_path / "flex.tflite", flex=True)
    with pytest.raises(Failure, match="without SELECT_TF_OPS"):
        convert(tmp_path, path)


def test_every_cut_of_a_lite_model_is_refused(tmp_path: Path, lite: Path) -> None:
    content = lite.read_bytes()
    source = source_of(tmp_path, lite)
    for size in range(12, len(content) - 600, len(content) // 12):
        source.path.write_bytes(content[:size])
        with pytest.raises(Failure) as caught:
            TensorFlowLiteImporter().convert(source, ImportOptions())
        assert caught.value.code is Code.INVALID


@pytest.mark.parametrize("batching", [True, None])
def test_what_openvino_made_is_checked_and_served_by_its_backend(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, batching: bool | None
) -> None:
    monkeypatch.setattr(importer, "needed_modules", lambda: ("openvino",))
    imported = convert(tmp_path, saved)
    checked = asyncio.run(check_in_place(imported.path.parent, imported.path.name, batching, Settings(home=tmp_path)))
    assert (checked.source_format, checked.files) == ("openvino", ("model.xml", "model.bin"))
    assert checked.signature.batching is bool(batching)
    assert [(one.name, one.shape) for one in checked.signature.inputs] == [("image", (-1, 16, 16, 3))]
    instance = get_backend("openvino").load(imported.path, checked.signature, "cpu", 1)
    found = dict(zip([one.name for one in checked.signature.outputs], instance.run({"image": IMAGES}), strict=True))
    wanted = tensorflow_models.answer(saved, image=IMAGES)
    np.testing.assert_allclose(found["scores"], wanted["scores"], rtol=1e-4, atol=1e-6)


def test_rows_that_influence_each_other_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    monkeypatch.setattr(importer, "needed_modules", lambda: ("openvino",))
    folder = tensorflow_models.one_function(
        tmp_path / "m", lambda x: {"y": x - tf.reduce_mean(x, 0)}, "float32", [None, 2], "serving_default"
    )
    path = convert(tmp_path, folder).path
    with pytest.raises(Failure, match="depends on the other rows"):
        asyncio.run(check_in_place(path.parent, path.name, True, Settings(home=tmp_path)))
