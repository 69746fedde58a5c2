"""SavedModels and TensorFlow Lite models, pushed to a running product and called over REST."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from millstream.client.client import Client
from millstream.services.errors import Failure
from tests.kit import tensorflow_models
from tests.kit.command_line import Millstream
from tests.kit.stack import Stack, running_stack

pytestmark = pytest.mark.frameworks

IMAGES = np.random.default_rng(3).standard_normal((3, 16, 16, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tensorflow_models.cnn(tmp_path_factory.mktemp("saved") / "cnn")


def check_answers(stack: Stack, model: str, saved: Path) -> None:
    wanted = tensorflow_models.answer(saved, image=IMAGES)
    with Client(stack.url, key=stack.key) as client:
        found = client.predict(model, {"image": IMAGES})
    np.testing.assert_allclose(found["scores"], wanted["scores"], rtol=1e-3, atol=1e-5)
    assert found["label"].tolist() == wanted["label"].tolist()


def test_a_folder_that_tensorflow_saved_is_served_in_one_command(stack: Stack, saved: Path) -> None:
    assert "ready" in Millstream(stack.home).ok("push", "folder", saved)
    version = stack.http.get("/admin/v1/models/folder/versions/1").json()
    assert version["imported"]["importer"] == "TensorFlow"
    assert version["batching_decided"] == "proven"
    check_answers(stack, "folder", saved)


@pytest.mark.parametrize("archive", ["zip", "gztar"])
def test_an_archive_of_the_folder_is_served(stack: Stack, saved: Path, tmp_path: Path, archive: str) -> None:
    file = Path(shutil.make_archive(str(tmp_path / "model"), archive, saved))
    with Client(stack.url, key=stack.key) as client:
        client.push(f"archive-{archive}", file, wait_s=300)
    check_answers(stack, f"archive-{archive}", saved)


def test_a_tensorflow_lite_file_is_served(stack: Stack, saved: Path, tmp_path: Path) -> None:
    path = tensorflow_models.lite(saved, tmp_path / "cnn.tflite")
    with Client(stack.url, key=stack.key) as client:
        version = client.push("lite", path, wait_s=300)
    assert version["imported"] is not None
    check_answers(stack, "lite", saved)


def test_a_damaged_model_leaves_nothing_and_the_version_before_serves(
    stack: Stack, saved: Path, tmp_path: Path
) -> None:
    with Client(stack.url, key=stack.key) as client:
        client.push("kept", saved, wait_s=300)
        broken = tmp_path / "broken"
        shutil.copytree(saved, broken)
        weights = broken / "variables" / "variables.data-00000-of-00001"
        weights.write_bytes(weights.read_bytes()[:40])
        with pytest.raises(Failure, match="cannot load the SavedModel"):
            client.push("kept", broken, wait_s=300)
    check_answers(stack, "kept", saved)
    assert not list((stack.home / "repository").glob("staging/*"))


def test_a_folder_of_tensorflow_serving_is_served(stack: Stack, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "base" / "7")
    with Client(stack.url, key=stack.key) as client:
        client.push("serving", tmp_path / "base", wait_s=300)
    check_answers(stack, "serving", saved)


def test_what_onnx_cannot_say_is_served_by_openvino(tmp_path: Path) -> None:
    import tensorflow as tf

    folder = tensorflow_models.one_function(
        tmp_path / "m", lambda x: {"y": tf.math.xlog1py(x, tf.abs(x))}, "float32", [None, 2], "serving_default"
    )
    with running_stack(tmp_path, pools="ov=1,backend=openvino") as stack, Client(stack.url, key=stack.key) as client:
        version = client.push("model", folder, wait_s=300)
        assert version["imported"] is not None
        x = np.array([[1, 2], [3, 0]], np.float32)
        found = client.predict("model", {"x": x})["y"]
    np.testing.assert_allclose(found, x * np.log1p(x), rtol=1e-4)
