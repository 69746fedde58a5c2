"""Uploads in the console, as a writer: the check and its verdict, progress, and what happens when one ends early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.kit import models
from tests.kit.browser import Visitor, visiting
from tests.kit.stack import Stack
from tests.kit.tcp_proxy import TcpProxy
from tests.kit.wait import wait_until

UP_BYTES_S = 1 << 20
SMALL_BYTES, LARGE_BYTES = 2 << 20, 24 << 20  # the connection's buffers hold less than the large one
pytestmark = pytest.mark.needs("chromium")


def choose(writer: Visitor, path: Path) -> Page:
    page = writer.open("upload")
    page.get_by_label("Model file").set_input_files(path)
    return page


def test_a_writer_uploads_a_model_and_tries_it(writer, server, tmp_path):
    page = choose(writer, models.scale(tmp_path / "fresh.onnx", 3.0))
    expect(page.get_by_label("Name", exact=True)).to_have_value("fresh")
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(page.get_by_text("fresh version 1: It answers.")).to_be_visible()
    expect(page.get_by_text("Requests share runs of up to")).to_be_visible()
    page.get_by_role("link", name="Try it").click()
    page.get_by_label("Values as JSON, flat or nested").fill("[2, 4]")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("region", name="y, row 1")).to_contain_text("12")
    server.http.delete("/admin/v1/models/fresh")


def test_a_file_that_fails_its_check_says_what_to_do(writer, tmp_path):
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    page = choose(writer, tmp_path / "broken.onnx")
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(page.get_by_role("alert")).to_be_visible()
    expect(page.get_by_text("What to do: Mend what it says")).to_be_visible()
    (tmp_path / "broken.onnx").write_bytes(b"\x80\x04csklearn.linear_model._base\nLinearRegression\n.")  # a pickle
    page.get_by_label("Model file").set_input_files(tmp_path / "broken.onnx")
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(page.get_by_text("What to do: If you trust the file, tick")).to_be_visible()


@pytest.fixture
def line(server: Stack) -> Iterator[TcpProxy]:
    """A slow connection to the server, which can be cut."""
    proxy = TcpProxy(f"127.0.0.1:{server.port}", up_bytes_s=UP_BYTES_S)
    yield proxy
    proxy.close()


@pytest.fixture
def distant(browser: Browser, line: TcpProxy, writing_key: str) -> Iterator[Visitor]:
    """Who has signed in over that connection, with a key that may change models."""
    with visiting(browser, f"http://{line.address}") as visitor:
        visitor.sign_in(writing_key).get_by_role("link", name="Upload", exact=True).wait_for()
        yield visitor


def test_an_upload_goes_on_beside_other_pages_and_is_cancelled_with_nothing_lost(distant, server, tmp_path):
    page = choose(distant, models.weighty(tmp_path / "cancelled.onnx", LARGE_BYTES))
    page.get_by_role("button", name="Upload", exact=True).click()
    page.get_by_role("link", name="Models").click()
    expect(page.get_by_role("link", name="one", exact=True)).to_be_visible()
    page.get_by_role("link", name="Upload").filter(has_text="%").click()
    expect(page.get_by_label("progress of the upload")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("It was cancelled. The server has kept nothing of it")).to_be_visible()
    expect(page.get_by_label("Name", exact=True)).to_have_value("cancelled")
    expect(page.get_by_role("button", name="Send again")).to_be_enabled()
    # The connection has some seconds of it on the way.
    wait_until(lambda: server.http.get("/admin/v1/models/cancelled").status_code == 404, what="the upload has ended")


def test_an_upload_that_breaks_says_so_and_is_sent_again(distant, line, server, tmp_path):
    page = choose(distant, models.weighty(tmp_path / "broken-off.onnx", SMALL_BYTES))
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(page.get_by_role("button", name="Cancel")).to_be_visible()
    line.close()
    expect(page.get_by_role("alert")).to_contain_text("the connection was lost before the upload ended")
    expect(page.get_by_text("What to do: An upload cannot be continued")).to_be_visible()
    line.open()
    page.get_by_role("button", name="Send again").click()
    expect(page.get_by_text("broken-off version 1: It answers.")).to_be_visible()
    server.http.delete("/admin/v1/models/broken-off")


def test_fields_outlive_a_reload_and_the_file_is_asked_for(writer, tmp_path):
    page = choose(writer, models.scale(tmp_path / "kept.onnx"))
    page.get_by_label("Version", exact=True).fill("7")
    page.reload()
    expect(page.get_by_label("Name", exact=True)).to_have_value("kept")
    expect(page.get_by_label("Version", exact=True)).to_have_value("7")
    expect(page.get_by_text("A reload forgets the file: choose it again.")).to_be_visible()
    expect(page.get_by_role("button", name="Upload", exact=True)).to_be_disabled()
