"""Exports small functions of JAX with jax2onnx, or by jax2tf and tf2onnx. python of_jax.py FOLDER

jax2tf writes what tf2onnx can read up to JAX 0.5, with `native_serialization=False, enable_xla=False`: later releases
write the calls of XLA alone.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")

import jax
import jax.numpy as jnp
import numpy as np

RANDOM = np.random.default_rng(0)


def _weights(*shape: int) -> Any:
    return jnp.asarray(RANDOM.normal(size=shape).astype(np.float32))


W, V, HEADS, WORDS, WINDOW = _weights(4, 8), _weights(8, 3), _weights(8, 24), _weights(20, 8), _weights(3, 3, 3, 3)


def mlp(x: Any) -> Any:
    return jax.nn.relu(x @ W) @ V


def cnn(x: Any) -> Any:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, WINDOW, (1, 1), "SAME", dimension_numbers=layout).mean((1, 2))


def resnet(x: Any) -> Any:
    layout = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, WINDOW, (1, 1), "SAME", dimension_numbers=layout)
    return jax.nn.relu(x + y).mean((1, 2))


def pooling(ids: Any, mask: Any) -> Any:
    weights = mask[..., None].astype(np.float32)
    return (jnp.take(WORDS, ids, axis=0) * weights).sum(1) / jnp.maximum(weights.sum(1), 1e-9)


def encoder(ids: Any, mask: Any) -> Any:
    x = WORDS[ids]
    rows, length, _ = x.shape
    q, k, v = (part.reshape(rows, length, 2, 4).transpose(0, 2, 1, 3) for part in jnp.split(x @ HEADS, 3, -1))
    scores = jnp.where(mask[:, None, None, :] > 0, jnp.einsum("bhqd,bhkd->bhqk", q, k) / 2, -1e9)
    y = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v).transpose(0, 2, 1, 3).reshape(rows, length, 8) + x
    return ((y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5))[:, 0]


def rnn(x: Any) -> Any:
    def step(state: Any, given: Any) -> tuple[Any, Any]:
        state = jnp.tanh(given @ W + state @ HEADS[:, :8])
        return state, state

    state, _ = jax.lax.scan(step, jnp.zeros((x.shape[0], 8)), x.transpose(1, 0, 2))
    return state


def autoencoder(x: Any) -> Any:
    return jax.nn.sigmoid(jax.nn.relu(x @ W) @ W.T)


def classifier(x: Any) -> Any:
    return jax.nn.softmax(mlp(x))


TABLE, IMAGE, SERIES = ((4,), np.float32), ((8, 8, 3), np.float32), ((5, 4), np.float32)
TOKENS = ((7,), np.int32)
MODELS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "mlp": (mlp, [TABLE]),
    "cnn": (cnn, [IMAGE]),
    "rnn": (rnn, [SERIES]),
    "encoder": (encoder, [TOKENS, TOKENS]),
    "pooling": (pooling, [TOKENS, TOKENS]),
    "resnet": (resnet, [IMAGE]),
    "autoencoder": (autoencoder, [TABLE]),
    "classifier": (classifier, [TABLE]),
}


def with_jax2onnx(function: Callable[..., Any], inputs: list[Any], path: Path) -> None:
    import onnx
    from jax2onnx import to_onnx

    specs = [jax.ShapeDtypeStruct(("B", *shape), kind) for shape, kind in inputs]
    onnx.save(to_onnx(function, inputs=specs), path)


def with_tf2onnx(function: Callable[..., Any], inputs: list[Any], path: Path) -> None:
    import tensorflow as tf
    import tf2onnx
    from jax.experimental import jax2tf

    shapes = [f"(b,{','.join(map(str, shape))})" for shape, _ in inputs]
    options = {"native_serialization": False, "enable_xla": False}
    called = tf.function(jax2tf.convert(function, polymorphic_shapes=shapes, **options), autograph=False)
    specs = [tf.TensorSpec((None, *shape), kind, name=f"in{at}") for at, (shape, kind) in enumerate(inputs)]
    tf2onnx.convert.from_function(called, input_signature=specs, output_path=str(path))


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    for name, (function, inputs) in MODELS.items():
        if find_spec("jax2onnx"):
            with_jax2onnx(function, inputs, folder / f"jax2onnx; {name}.onnx")
        else:
            with_tf2onnx(function, inputs, folder / f"jax2tf, tf2onnx; {name}.onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
