"""Exports small Keras models with tf2onnx, with Keras' own call of it, and as TensorFlow Lite. python … FOLDER"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="", KERAS_BACKEND="tensorflow")

import keras
import tensorflow as tf
import tf2onnx
from keras import layers


def _stack(shape: tuple[int | None, ...], *parts: Any, dtype: str = "float32") -> Any:
    x = given = keras.Input(shape, dtype=dtype, name="x")
    for part in parts:
        x = part(x)
    return keras.Model(given, x)


def _encoder() -> Any:
    ids, mask = (keras.Input((None,), dtype="int32", name=name) for name in ("ids", "mask"))
    words = layers.Embedding(20, 8)(ids)
    seen = layers.Lambda(lambda given: given[:, None, :] > 0)(mask)
    x = layers.LayerNormalization()(words + layers.MultiHeadAttention(2, 4)(words, words, attention_mask=seen))
    return keras.Model([ids, mask], layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def _residual() -> Any:
    image = keras.Input((8, 8, 3), name="x")
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(3, 3, padding="same")(image)))
    x = layers.ReLU()(layers.Add()([layers.Conv2D(3, 3, padding="same")(x), image]))
    return keras.Model(image, layers.Dense(2)(layers.GlobalAveragePooling2D()(x)))


def models() -> dict[str, Any]:
    same = {"strides": 2, "padding": "same"}
    return {
        "mlp": _stack((4,), layers.Dense(8, "relu"), layers.Dropout(0.1), layers.Dense(3)),
        "cnn": _stack(
            (8, 8, 3), layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten(), layers.Dense(5)
        ),
        "lstm": _stack((5, 4), layers.LSTM(6), layers.Dense(2)),
        "gru": _stack((5, 4), layers.GRU(6), layers.Dense(2)),
        "encoder": _encoder(),
        "pooling": _stack(
            (None,), layers.Embedding(20, 8, mask_zero=True), layers.GlobalAveragePooling1D(), dtype="int32"
        ),
        "resnet": _residual(),
        "autoencoder": _stack((8, 8, 1), layers.Conv2D(4, 3, **same), layers.Conv2DTranspose(1, 3, **same)),
        "classifier": _stack((4,), layers.Dense(3, activation="softmax")),
        "pipeline": _stack((4,), layers.Normalization(mean=[0.5] * 4, variance=[2.0] * 4), layers.Dense(3)),
    }


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    for name, model in models().items():
        signature = [tf.TensorSpec(given.shape, given.dtype, name=given.name) for given in model.inputs]

        def call(*given: Any, model: Any = model) -> Any:
            return model(list(given) if len(given) > 1 else given[0], training=False)

        path = str(folder / f"tf2onnx; {name}.onnx")
        tf2onnx.convert.from_function(tf.function(call), input_signature=signature, output_path=path)
        model.export(str(folder / f"Keras, `format='onnx'`; {name}.onnx"), format="onnx", verbose=False)
        lite = folder / "model.tflite"
        try:
            lite.write_bytes(tf.lite.TFLiteConverter.from_keras_model(model).convert())
        except Exception as error:  # TensorFlow Lite has no form of it
            print(f"TensorFlow Lite has no {name}: {str(error)[:80]}")
            continue
        tf2onnx.convert.from_tflite(str(lite), output_path=str(folder / f"tf2onnx, TensorFlow Lite; {name}.onnx"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
