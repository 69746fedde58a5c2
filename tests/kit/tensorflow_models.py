"""SavedModels and TensorFlow Lite models. Only tests in tests/frameworks may call these."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np


@cache
def _tensorflow() -> Any:
    import tensorflow as tf

    return tf


def cnn(folder: Path, **others: Any) -> Path:
    """ "image" FP32 [N, 16, 16, 3] -> "scores" FP32 [N, 5], "label" INT64 [N]. `others`: further signatures."""
    tf = _tensorflow()
    generator = np.random.default_rng(0)
    module = tf.Module()
    module.kernel = tf.Variable(generator.standard_normal((3, 3, 3, 8)).astype(np.float32))
    module.head = tf.Variable(generator.standard_normal((8, 5)).astype(np.float32))

    def function(image: Any) -> Any:
        found = tf.nn.relu(tf.nn.conv2d(image, module.kernel, 1, "SAME"))
        found = tf.reduce_mean(tf.nn.max_pool2d(found, 2, 2, "VALID"), [1, 2]) @ module.head
        return {"scores": tf.nn.softmax(found), "label": tf.argmax(found, 1)}

    module.function = tf.function(
        function, input_signature=[tf.TensorSpec([None, 16, 16, 3], tf.float32, name="image")]
    )
    tf.saved_model.save(module, str(folder), signatures={"serving_default": module.function, **others})
    return folder


def answer(folder: Path, **inputs: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return what TensorFlow answers for a SavedModel's signature serving_default."""
    tf = _tensorflow()
    loaded = tf.saved_model.load(str(folder))
    found = loaded.signatures["serving_default"](**{name: tf.constant(array) for name, array in inputs.items()})
    return {name: value.numpy() for name, value in found.items()}


def lite(saved_model: Path, path: Path, *, flex: bool = False) -> Path:
    """Convert a SavedModel to TensorFlow Lite. `flex`: TensorFlow's own operators are allowed."""
    tf = _tensorflow()
    converter = tf.lite.TFLiteConverter.from_saved_model(str(saved_model))
    if flex:
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS, tf.lite.OpsSet.SELECT_TF_OPS]
    path.write_bytes(converter.convert())
    return path


def one_function(folder: Path, function: Any, dtype: str, shape: list[int | None], signature: str) -> Path:
    """Save a SavedModel of one function of "x"."""
    tf = _tensorflow()
    module = tf.Module()
    module.function = tf.function(function, input_signature=[tf.TensorSpec(shape, dtype, name="x")])
    tf.saved_model.save(module, str(folder), signatures={signature: module.function})
    return folder
