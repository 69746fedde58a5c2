"""Pages of text by the example's graph: its detector, reader and functions answer as the library rapidocr does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rapidocr
from PIL import Image, ImageDraw, ImageFont

from millstream.client.client import Client
from millstream.client.errors import ServerError
from tests.kit.stack import Stack, running_stack, token_of

pytestmark = [pytest.mark.frameworks]

EXAMPLE = Path(__file__).parents[2] / "examples" / "ocr"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("ocr")
    subprocess.run([sys.executable, EXAMPLE / "models.py", folder], check=True)
    with running_stack(folder / "home") as running:
        for name in ("shrink", "crop", "upright"):
            running.push(f"ocr-{name}", EXAMPLE / f"{name}.py")
        running.push("ocr-detector", folder / "detector.onnx")
        running.push("ocr-angle", folder / "angle.onnx")
        with Client(f"http://127.0.0.1:{running.port}", key=token_of(running.home)) as client:
            client.push("ocr-reader", folder / "reader", wait_s=60)
        running.push("ocr", EXAMPLE / "graph.yaml")
        yield running


def page(
    lines: list[str], *, size: tuple[int, int] = (640, 400), angle: float = 0, mode: str = "RGB", height: int = 30
) -> Image.Image:
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    for number, line in enumerate(lines):
        draw.text((40, 30 + 2 * height * number), line, "black", font=ImageFont.load_default(size=height))
    return picture.rotate(angle, expand=True, fillcolor="white").convert(mode)


PAGES = {
    "lines": page(["invoice 2026", "total 1,234.50", "thank you"]),
    "upside down": page(["page 7 of 12", "MILLSTREAM"], angle=180),
    "turned a little": page(["a line that is not level", "and another"], angle=8),
    "on its side": page(["sideways"], angle=90, size=(300, 120)),
    "grey, and small": page(["small"], size=(200, 100), mode="L"),
    "wide": page(["a very wide strip of a page with one line of text"], size=(1400, 110)),
    "large": page(["large page"], size=(2600, 1500), height=90),
}


@pytest.fixture(scope="module")
def library() -> Any:
    return rapidocr.RapidOCR()


def read(stack: Stack, picture: Image.Image) -> dict[str, Any]:
    with Client(f"http://127.0.0.1:{stack.port}", key=token_of(stack.home)) as client:
        return dict(client.predict("ocr", picture))


@pytest.mark.parametrize("name", PAGES)
def test_the_graph_reads_what_the_library_reads(stack: Stack, library: Any, name: str) -> None:
    picture = PAGES[name]
    expected = library(np.asarray(picture.convert("RGB"))[:, :, ::-1].copy())
    found = read(stack, picture)
    sure = found["score"] >= 0.5  # as the library's threshold
    assert list(found["text"][sure]) == list(expected.txts)
    assert len(expected.txts) > 0
    assert np.allclose(found["score"][sure], expected.scores, atol=1e-3)
    assert np.allclose(found["boxes"][sure], expected.boxes, atol=1)


def test_a_page_without_text_ends_the_graph_early(stack: Stack) -> None:
    before = stack.metrics().value("millstream_requests_total", model="ocr-reader", protocol="graph", outcome="ok")
    found = read(stack, Image.new("RGB", (320, 240), "white"))
    assert [found[name].shape for name in ("text", "score", "boxes")] == [(0,), (0,), (0, 4, 2)]
    after = stack.metrics().value("millstream_requests_total", model="ocr-reader", protocol="graph", outcome="ok")
    assert after == before, "the reader did not run"


def test_a_file_that_is_no_picture_is_the_callers_mistake(stack: Stack) -> None:
    with Client(f"http://127.0.0.1:{stack.port}", key=token_of(stack.home)) as client:
        with pytest.raises(ServerError, match="an image cannot be read") as refused:
            client.predict("ocr", b"\xff\xd8\xff no picture")
        assert refused.value.status == 400
