"""The console of a server without keys, to who has not signed in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.kit import models
from tests.kit.browser import visiting
from tests.kit.stack import Stack, running_stack

pytestmark = pytest.mark.needs("chromium")


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("open")
    with running_stack(folder, models={"one": models.scale(folder / "one.onnx")}) as stack:
        yield stack


def test_who_has_not_signed_in_sees_what_anybody_may_and_where_the_rest_is(browser, open_server):
    with visiting(browser, open_server.url) as visitor:
        page = visitor.open()
        links = page.get_by_role("navigation", name="pages", exact=True).get_by_role("link")
        expect(links).to_have_text(["Overview", "Models"])
        expect(page.get_by_text("There is no key yet, so anybody may call the models here.")).to_be_visible()
        expect(page.get_by_role("region", name="endpoints")).to_contain_text("one")
        page.get_by_role("link", name="Models").click()
        expect(page.get_by_role("region", name="models").get_by_role("row").nth(1)).to_contain_text("ready")
        page.get_by_role("link", name="one", exact=True).click()
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_text("Answered in")).to_be_visible()
        expect(page.get_by_label("call with curl")).not_to_contain_text("Authorization")


def test_a_link_to_another_page_asks_to_sign_in_and_leads_there(browser, open_server):
    with visiting(browser, open_server.url) as visitor:
        page = visitor.open("workers")
        page.get_by_label("API key").fill(open_server.key)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", name="Workers and placement")).to_be_visible()
        page.get_by_role("link", name="Keys").click()
        expect(page.get_by_text("There is no key: whoever reaches this server may call its models.")).to_be_visible()
