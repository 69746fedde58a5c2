"""Forms that try a model in the console, for each kind of input, and how answers are shown."""

from __future__ import annotations

import json
import struct
import wave
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.kit import models
from tests.kit.browser import Visitor
from tests.kit.stack import Stack

pytestmark = pytest.mark.needs("chromium")
HOSTILE = '<img src=x onerror="window.hacked=1">'
Tried = Callable[..., Page]


@pytest.fixture
def tried(writer: Visitor, server: Stack, request: pytest.FixtureRequest) -> Iterator[Tried]:
    """Uploads a model and opens the form that tries it."""
    name = request.node.name.removeprefix("test_").replace("_", "-")[:40]

    def trying(path: Path, config: str | None = None) -> Page:
        server.push(name, path, config=config)
        return writer.open("models", name, query="?tab=try")

    yield trying
    server.http.delete(f"/admin/v1/models/{name}")


def send(page: Page) -> None:
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_text("Answered in")).to_be_visible()


def red_png(side: int = 8) -> bytes:
    """Return a PNG image. Source: W3C, "Portable Network Graphics", 4 and 5."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\xff\0\0" * side) * side)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_texts_are_sent_by_line_and_markup_in_an_answer_is_text(tried, tmp_path):
    page = tried(models.identity(tmp_path / "m.onnx", "BYTES", ("N", 1)))
    page.get_by_label("Text", exact=True).fill(f"first\n{HOSTILE}")
    page.get_by_label("Each line is a text of its own").check()
    send(page)
    answer = page.get_by_role("region", name="answer")
    expect(answer.get_by_role("row")).to_have_count(3)
    expect(answer).to_contain_text("onerror=")
    assert page.evaluate("window.hacked") is None


def test_an_image_is_scaled_to_what_the_model_takes(tried, tmp_path):
    page = tried(models.image_means(tmp_path / "m.onnx"))
    page.get_by_label("Image file").set_input_files({"name": "red.png", "mimeType": "image/png", "buffer": red_png()})
    expect(page.get_by_alt_text("what will be sent")).to_be_visible()
    page.get_by_label("Values that the model was trained with").select_option("0 to 255")
    send(page)
    row = page.get_by_role("region", name="means, row 1").get_by_role("row").nth(1)
    expect(row).to_contain_text("255")
    page.get_by_label("Image file").set_input_files({"name": "x.png", "mimeType": "image/png", "buffer": b"no image"})
    expect(page.get_by_role("alert")).to_contain_text("cannot read it as an image")


def test_an_image_that_the_server_prepares_is_sent_as_the_file(tried, tmp_path):
    steps = {"image": {"resize": 224, "crop": 224}}
    page = tried(models.image_means(tmp_path / "m.onnx"), json.dumps({"prepare": {"image": steps}}))
    red = {"name": "red.png", "mimeType": "image/png", "buffer": red_png()}
    page.get_by_label("File of image").set_input_files(red)
    expect(page.get_by_alt_text("what will be sent as image")).to_be_visible()
    send(page)
    row = page.get_by_role("region", name="means, row 1").get_by_role("row").nth(1)
    expect(row.get_by_role("cell")).to_have_text(["0", "1"])


def test_a_recording_that_the_server_prepares_can_be_heard_and_is_sent_as_the_file(tried, tmp_path):
    steps = {"audio": {"rate": 16000}}
    page = tried(models.loudness(tmp_path / "m.onnx"), json.dumps({"prepare": {"input_values": steps}}))
    with wave.open(str(tmp_path / "tone.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(struct.pack("<h", 1 << 14) * 16000)
    page.get_by_label("File of audio").set_input_files(tmp_path / "tone.wav")
    sound = page.get_by_label("what will be sent as audio")
    expect(sound).to_have_js_property("duration", 1)
    send(page)
    expect(page.get_by_role("region", name="answer")).to_contain_text("0.25")


def test_a_table_is_read_from_csv_and_a_wrong_cell_is_named(tried, tmp_path):
    page = tried(models.identities(tmp_path / "m.onnx", ("FP32", "BYTES"), 1))
    (tmp_path / "rows.csv").write_text('x1;x0\n"a;b";0.5\nc;2\n')
    page.get_by_label("CSV file").set_input_files(tmp_path / "rows.csv")
    send(page)
    rows = page.get_by_role("region", name="answer").get_by_role("row")
    expect(rows.nth(1)).to_contain_text("a;b")
    expect(rows.nth(1)).to_contain_text("0.5")
    page.get_by_label("Rows, with the names").fill("x0,x1\nhalf,a\n")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_contain_text('row 1, x0: "half" is no number')


def test_tensors_are_kept_over_a_reload_and_wrong_ones_are_named(tried, tmp_path):
    page = tried(models.identity(tmp_path / "m.onnx", "FP16"))
    page.get_by_label("Values", exact=True).select_option("as written")
    values = page.get_by_label("Values as JSON, flat or nested")
    values.fill("[1.5, 2, 3]")
    page.reload()
    expect(values).to_have_value("[1.5, 2, 3]")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_contain_text("there are 3 values, and the shape [1, 2] has 2")
    values.fill("[[1.5, 2]]")
    send(page)
    expect(page.get_by_role("region", name="y, row 1")).to_contain_text("1.5")


def test_best_classes_are_asked_for(tried, tmp_path):
    page = tried(models.identity(tmp_path / "m.onnx", "FP32", ("N", 3)))
    page.get_by_label("Values as JSON, flat or nested").fill("[0.1, 0.7, 0.2]")
    page.get_by_label("best classes").check()
    send(page)
    expect(page.get_by_role("region", name="y, row 1").get_by_role("row").nth(1)).to_contain_text("class 1")


def test_a_huge_answer_is_cut_with_a_link_to_the_whole(tried, tmp_path):
    page = tried(models.spread(tmp_path / "m.onnx", 1 << 16))
    page.get_by_label("Values as JSON, flat or nested").fill("[0.25]")
    send(page)
    expect(page.get_by_text("The 5 largest of 65536 values, by place.")).to_be_visible()
    page.get_by_role("tab", name="JSON", exact=True).click()
    expect(page.get_by_text("The first 20 KiB of")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download the whole answer").click()
    whole = json.loads(Path(download.value.path()).read_text())
    assert whole["outputs"][0]["data"] == [0.25] * (1 << 16)


def test_an_error_of_the_model_is_shown_and_the_request_stays(tried, tmp_path):
    page = tried(models.failing(tmp_path / "m.onnx"))
    page.get_by_role("tab", name="Request as JSON").click()
    request = {"inputs": [{"name": "index", "shape": [1, 1], "datatype": "INT64", "data": [99]}]}
    text = page.get_by_label("Request of the Open Inference Protocol (v2)")
    text.fill(json.dumps(request))
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_be_visible()
    expect(text).to_have_value(json.dumps(request))
    text.fill('{"inputs": ')
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert").filter(has_text="This is no JSON")).to_be_visible()
