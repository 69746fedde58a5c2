"""Reading lines of text as a graph: the models of rapidocr, joined by two small ones, answer as the library does.

lines ─> angle: which are upside down ─> upright: turned, padded ─> reader ─> best: the class and score of each place
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
import rapidocr
from PIL import Image, ImageDraw, ImageFont
from rapidocr.ch_ppocr_rec.typings import TextRecInput

from tests.kit.graphs import Array, call, outputs, push_graph
from tests.kit.stack import Stack, running_stack

pytestmark = [pytest.mark.frameworks]

MODELS = Path(rapidocr.__file__).parent / "models"
TEXTS = ["invoice 2026", "total 1,234.50", "thank you", "page 7 of 12", "MILLSTREAM"]
HEIGHT, WIDTH = 48, 192  # as the library's classifier of angles takes lines
READ_WIDTH = 320  # the reader's least width
GRAPH = """
steps:
  angle: {model: ocr-angle, inputs: {x: lines}}
  upright: {model: ocr-upright, inputs: {lines: lines, angles: angle.save_infer_model/scale_0.tmp_1}}
  read: {model: ocr-reader, inputs: {x: upright.turned}}
  best: {model: ocr-best, inputs: {scores: read.fetch_name_0}}
outputs: {classes: best.classes, scores: best.score}
"""
#: turns the lines that are upside down with a probability above 0.9, and pads them on the right
UPRIGHT = f"""
<ir_version: 8, opset_import: ["": 17]>
upright (float[N, 3, {HEIGHT}, {WIDTH}] lines, float[N, 2] angles) => (float[N, 3, {HEIGHT}, {READ_WIDTH}] turned)
<float above = {{0.9}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[4] to = {{-1, 1, 1, 1}},
 int64[2] starts = {{-1, -1}}, int64[2] ends = {{-9999, -9999}}, int64[2] axes = {{2, 3}}, int64[2] steps = {{-1, -1}},
 int64[8] pads = {{0, 0, 0, 0, 0, 0, 0, {READ_WIDTH - WIDTH}}}>
{{
   flipped = Slice(lines, starts, ends, axes, steps)
   down = Slice(angles, one, two, one)
   is_down = Greater(down, above)
   each = Reshape(is_down, to)
   upright = Where(each, flipped, lines)
   turned = Pad(upright, pads)
}}
"""
BEST = """
<ir_version: 8, opset_import: ["": 17]>
best (float[N, T, C] scores) => (int64[N, T] classes, float[N, T] score)
{
   classes = ArgMax<axis = 2, keepdims = 0>(scores)
   score = ReduceMax<axes = [2], keepdims = 0>(scores)
}
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("ocr")
    with running_stack(folder / "home") as running:
        for name, text in (("ocr-upright", UPRIGHT), ("ocr-best", BEST)):
            path = folder / f"{name}.onnx"
            path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
            running.push(name, path)
        running.push("ocr-angle", MODELS / "ch_ppocr_mobile_v2.0_cls_mobile.onnx")
        running.push("ocr-reader", MODELS / "PP-OCRv6_rec_small.onnx")
        push_graph(running, "ocr", GRAPH)
        yield running


def images() -> list[Array]:
    """Return pictures of lines; every second one is upside down."""
    font, found = ImageFont.load_default(size=26), []
    for number, text in enumerate(TEXTS):
        picture = Image.new("RGB", (WIDTH, HEIGHT), "white")
        ImageDraw.Draw(picture).text((4, 8), text, "black", font=font)
        found.append(np.asarray(picture.rotate(180) if number % 2 else picture)[:, :, ::-1].copy())
    return found


def decoded(classes: Array, scores: Array, characters: list[str]) -> tuple[str, float]:
    """Return the text of a line and its mean score: repeated classes are one, and class 0 is none (CTC)."""
    kept = [n for n, one in enumerate(classes) if one and (n == 0 or one != classes[n - 1])]
    return "".join(characters[classes[n]] for n in kept), float(np.mean(scores[kept]))


def test_the_graph_reads_what_the_library_reads(stack: Stack) -> None:
    engine: Any = rapidocr.RapidOCR()
    lines = images()
    classifier, recogniser = engine._load_cls_model(), engine._load_rec_model()
    turned = classifier(lines)
    assert [label for label, _ in turned.cls_res] == ["0", "180", "0", "180", "0"]
    expected = recogniser(TextRecInput(img=turned.img_list))
    tensor = ((np.stack(lines).transpose(0, 3, 1, 2).astype(np.float32) / 255) - 0.5) / 0.5
    found = outputs(call(stack, "ocr", tensor, tensor="lines"))
    characters = recogniser.postprocess_op.character
    read = [decoded(*one, characters) for one in zip(found["classes"], found["scores"], strict=True)]
    assert [text for text, _ in read] == list(expected.txts)
    assert np.allclose([score for _, score in read], expected.scores, atol=1e-3)
