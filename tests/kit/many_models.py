"""Makes many small models quickly: distinct valid ONNX files of 150 bytes, each with an answer of its own."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
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
    yield from _with_other_weights("mlp", models.mlp, "b0", count)


def many_heavy(count: int, size_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield the names and the bytes of `count` models `heavy-0000`, … of `size_bytes`: models.heavy, as above."""
    yield from _with_other_weights("heavy", partial(models.heavy, size_bytes=size_bytes), "weights", count)


def _with_other_weights(
    kind: str, build: Callable[[Path], Path], weights: str, count: int
) -> Iterator[tuple[str, bytes]]:
    """Yield copies of a model, each with another first value of its tensor `weights`."""
    with TemporaryDirectory() as folder:
        template = build(Path(folder) / "model.onnx").read_bytes()
    graph = onnx.load_from_string(template).graph
    [data] = [one.raw_data for one in graph.initializer if one.name == weights]
    before, after = template.split(data)
    for number in range(count):
        yield f"{kind}-{number:04d}", before + struct.pack("<f", number / count) + data[4:] + after


def write_repository(folder: Path, made: Iterable[tuple[str, bytes]]) -> Path:
    """Write models as a Triton model repository below `folder`, and return it."""
    for name, content in made:
        version = folder / name / "1"
        version.mkdir(parents=True)
        (version / "model.onnx").write_bytes(content)
    return folder
