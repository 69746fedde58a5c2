"""Models of Keras 3, written by Keras with PyTorch as its backend: pushed, served as ONNX, and called over REST."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras reads it when it is imported

import keras

from millstream.client.client import Client
from millstream.services.errors import Failure
from tests.kit.stack import Stack, running_stack

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    keras.utils.set_random_seed(1)
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, key=stack.key) as client:
        yield client


def saved(path: Path, model: Any) -> Path:
    model.save(path.with_suffix(".keras"))
    return path.with_suffix(".keras")


def test_a_cnn_answers_as_keras_does(client: Client, tmp_path: Path) -> None:
    layers = keras.layers
    image = keras.Input((16, 16, 3), name="image")
    found = layers.Conv2D(8, 3, activation="relu", padding="same")(image)
    found = layers.MaxPooling2D()(layers.BatchNormalization()(found))
    found = layers.Dropout(0.3)(layers.GlobalAveragePooling2D()(found))
    model = keras.Model(image, layers.Dense(5, activation="softmax", name="classes")(found))
    version = client.push("cnn", saved(tmp_path / "cnn", model), wait_s=300)
    assert version["imported"] is not None
    assert version["imported"]["importer"] == "Keras"
    assert version["batching_decided"] == "proven"
    images = np.random.default_rng(1).standard_normal((4, 16, 16, 3), np.float32)
    expected = model.predict(images, verbose=0)
    assert np.allclose(client.predict("cnn", {"image": images})["classes"], expected, rtol=1e-3, atol=1e-5)


def test_several_inputs_and_outputs(client: Client, tmp_path: Path) -> None:
    layers = keras.layers
    words, numbers = keras.Input((None,), dtype="int32", name="words"), keras.Input((3,), name="numbers")
    vector = layers.GlobalAveragePooling1D()(layers.Embedding(10, 4)(words))
    both = layers.Concatenate()([vector, numbers])
    outputs = [layers.Dense(2, name="first")(both), layers.Dense(1, activation="sigmoid", name="second")(both)]
    model = keras.Model([words, numbers], outputs)
    client.push("two", saved(tmp_path / "two", model), wait_s=300)
    given = {"words": np.array([[1, 2, 3, 4, 5], [9, 0, 0, 1, 2]], np.int32), "numbers": np.ones((2, 3), np.float32)}
    expected = model.predict(given, verbose=0)
    answered = client.predict("two", given)
    for name, array in zip(("first", "second"), expected, strict=True):
        assert np.allclose(answered[name], array, rtol=1e-3, atol=1e-5)


def test_inputs_and_outputs_keep_their_names(client: Client, tmp_path: Path) -> None:
    layers = keras.layers
    price = keras.Sequential([keras.Input((4,), name="size"), layers.Dense(8), layers.Dense(2, name="price")])
    x = keras.Input((4,), name="n")
    of_keys = keras.Model(x, {"z": layers.Dense(1, name="first")(x), "a": layers.Dense(2, name="second")(x)})
    left, right = keras.Input((4,), name="left"), keras.Input((4,), name="right")
    tower = layers.Dense(3, name="tower")
    both = keras.Model({"r": left, "l": right}, [tower(left), tower(right)])
    rows = {at: np.random.default_rng(at).standard_normal((3, 4), np.float32) for at in range(2)}
    for name, model, given, outputs in (
        ("price", price, {"size": rows[0]}, ["price"]),
        ("keys", of_keys, {"n": rows[0]}, ["a", "z"]),
        ("tower", both, {"r": rows[0], "l": rows[1]}, ["tower", "tower_1"]),
    ):
        version = client.push(name, saved(tmp_path / name, model), wait_s=300)
        assert sorted(spec["name"] for spec in version["inputs"]) == sorted(given)
        assert [spec["name"] for spec in version["outputs"]] == outputs
        expected = model.predict(given if name == "tower" else rows[0], verbose=0)
        answered = client.predict(name, given)
        for at, output in enumerate(outputs):
            of_it = expected if len(outputs) == 1 else expected[output if isinstance(expected, dict) else at]
            assert np.allclose(answered[output], of_it, rtol=1e-3, atol=1e-5)


def test_lambda_layers_are_refused(client: Client, tmp_path: Path) -> None:
    x = keras.Input((2,))
    model = keras.Model(x, keras.layers.Lambda(lambda value: value * 2)(x))
    with pytest.raises(Failure, match="Lambda layer"):
        client.push("refused", saved(tmp_path / "m", model))


def test_classes_of_the_owner_are_named(client: Client, tmp_path: Path) -> None:
    class Twice(keras.layers.Layer):  # type: ignore[misc]
        def call(self, value: Any) -> Any:
            return value * 2

    x = keras.Input((2,))
    with pytest.raises(Failure, match=r"Twice.*is a class of your own"):
        client.push("refused", saved(tmp_path / "m", keras.Model(x, Twice()(x))))


def test_models_that_were_never_built_are_refused(client: Client, tmp_path: Path) -> None:
    with pytest.raises(Failure, match="before it is saved"):
        client.push("refused", saved(tmp_path / "m", keras.Sequential([keras.layers.Dense(2)])))


def test_truncated_files_are_refused(client: Client, tmp_path: Path) -> None:
    x = keras.Input((2,))
    path = saved(tmp_path / "m", keras.Model(x, keras.layers.Dense(2)(x)))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(Failure):
        client.push("refused", path)
