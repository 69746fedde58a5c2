"""Makes many small models quickly: distinct valid ONNX files of 150 bytes, each with an answer of its own."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx

from tests.kit import models

_PLACEHOLDER = 12345.678


def many_scales(count: int) -> Iterator[tuple[str, bytes]]:
    """Yield the names and the bytes of `count` models. `scale-0041` multiplies "x" FP32 [N, 2] by 42.

    One model is built, and the bytes of its factor are replaced: ONNX's builder takes 20 times as long.
    """
    with TemporaryDirectory() as folder:
        template = models.scale(Path(folder) / "model.onnx", factor=_PLACEHOLDER).read_bytes()
    before, after = template.split(struct.pack("<f", _PLACEHOLDER))
    for number in range(count):
        yield f"scale-{number:04d}", before + struct.pack("<f", number + 1) + after


def many_mlps(count: int) -> Iterator[tuple[str, bytes]]:
    """Yield the names and the bytes of `count` models `mlp-0000`, … of 340 KB: models.mlp with other first biases."""
    with TemporaryDirectory() as folder:
        template = models.mlp(Path(folder) / "model.onnx").read_bytes()
    [bias] = [one.raw_data[:4] for one in onnx.load_from_string(template).graph.initializer if one.name == "b0"]
    before, after = template.split(bias)
    for number in range(count):
        yield f"mlp-{number:04d}", before + struct.pack("<f", number / count) + after


def write_repository(folder: Path, made: Iterable[tuple[str, bytes]]) -> Path:
    """Write models as a Triton model repository below `folder`, and return it."""
    for name, content in made:
        version = folder / name / "1"
        version.mkdir(parents=True)
        (version / "model.onnx").write_bytes(content)
    return folder
