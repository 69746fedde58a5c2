"""Who sees what in the console, in a real browser: signing in and out, keys, and a server that is lost."""

from __future__ import annotations

import os
import signal

import pytest
from playwright.sync_api import Page, expect

from tests.kit.stack import Stack, token_of
from tests.kit.wait import wait_until
from tests.plugins.console.e2e.keys import create_key, infer

pytestmark = pytest.mark.needs("chromium")


def shown_pages(page: Page) -> list[str]:
    return page.get_by_role("navigation", name="pages", exact=True).get_by_role("link").all_inner_texts()


def test_an_operator_signs_in_by_the_link_of_the_command_line(visitor, server):
    page = visitor.page
    page.goto(f"{server.url}/console/#login={token_of(server.home)}")
    page.get_by_role("link", name="Audit").wait_for()
    assert page.evaluate("location.hash") == "#/"  # the key is not in the address any more
    assert page.evaluate("document.cookie") == ""  # nor where a script could read it


def test_a_wrong_key_is_refused_in_words(visitor):
    page = visitor.sign_in("mr_0000000000000000_wrong")
    expect(page.get_by_role("alert")).to_contain_text("no such key")
    expect(page.get_by_label("API key")).to_be_visible()


def test_a_reader_of_one_model_is_offered_no_more_than_that(visitor, server):
    page = visitor.sign_in(create_key(server, "reader", "infer:one", "models:read:one"))
    page.get_by_role("link", name="Models").click()
    expect(page.get_by_role("link", name="one", exact=True)).to_be_visible()
    expect(page.get_by_text("other", exact=True)).to_have_count(0)
    shown = set(shown_pages(page))
    assert "Models" in shown
    assert shown.isdisjoint({"Upload", "Keys", "Audit", "Logs"})
    visitor.open("keys")
    expect(page.get_by_text("your key may not open it")).to_be_visible()


def test_a_key_is_created_used_and_revoked_in_the_page(operator, server):
    page = operator.open("keys")
    page.get_by_role("button", name="Create a key").click()
    page.get_by_label("Name", exact=True).fill("made")
    page.get_by_label("Call the models").fill("one")
    page.get_by_label("Calls a second").fill("500")
    page.get_by_role("button", name="Create", exact=True).click()
    secret = page.get_by_label("secret of the key made").inner_text()
    assert infer(server, "one", secret).status_code == 200
    assert infer(server, "other", secret).status_code == 403
    row = page.get_by_role("row").filter(has_text="made")
    expect(row).to_contain_text("infer:one")
    expect(row).to_contain_text("500/s calls")

    row.get_by_role("button", name="Edit").click()
    page.get_by_label("Calls a second").fill("400")
    page.get_by_role("button", name="Save").click()
    expect(row).to_contain_text("400/s calls")

    page.get_by_role("button", name="Read anew").click()
    expect(row).to_contain_text("1 calls, 1 refused")

    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("button", name="Revoke", exact=True).click()
    expect(row).to_have_count(0)
    expect(page.get_by_label("secret of the key made")).to_have_count(0)
    assert infer(server, "one", secret).status_code == 401


def test_a_key_is_rotated_and_the_secret_before_ends(operator, server):
    old = create_key(server, "turned", "infer:one")
    page = operator.open("keys")
    page.get_by_role("button", name="Rotate the key turned").click()
    expect(page.get_by_role("dialog")).to_contain_text("Name, scopes and limits stay.")
    page.get_by_label("Hours for which").fill("0")
    page.get_by_role("button", name="Rotate", exact=True).click()
    new = page.get_by_label("secret of the key turned").inner_text()
    assert (infer(server, "one", old).status_code, infer(server, "one", new).status_code) == (401, 200)
    page.get_by_role("button", name="I have it").click()
    expect(page.get_by_label("secret of the key turned")).to_have_count(0)
    assert server.http.delete("/admin/v1/keys/turned").status_code == 200


def test_a_writer_is_offered_models_and_uploads_and_no_keys(writer):
    shown = set(shown_pages(writer.page))
    assert {"Overview", "Models", "Upload", "Workers", "Requests"} <= shown
    assert shown.isdisjoint({"Keys", "Audit", "Logs"})
    page = writer.open("models", "one")
    expect(page.get_by_role("button", name="Unload")).to_be_visible()
    expect(page.get_by_role("tab", name="Keys")).to_have_count(0)


def test_a_key_that_may_only_call_tries_models_and_sees_no_more(visitor, server):
    page = visitor.sign_in(create_key(server, "caller", "infer:one"))
    expect(page.get_by_role("heading", name="Models", level=1)).to_be_visible()
    assert shown_pages(page) == ["Models"]
    row = page.get_by_role("region", name="models").get_by_role("row").filter(has_text="one")
    expect(row).to_contain_text("ready")
    expect(page.get_by_text("other", exact=True)).to_have_count(0)
    page.get_by_role("link", name="one", exact=True).click()
    expect(page.get_by_text("Your key may call this model, and not read more about it.")).to_be_visible()
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_text("Answered in")).to_be_visible()
    expect(page.get_by_label("call with curl")).to_contain_text("/v2/models/one/infer")


def test_a_form_that_is_not_sent_outlives_a_reload(operator):
    page = operator.open("keys")
    page.get_by_role("button", name="Create a key").click()
    page.get_by_label("Name", exact=True).fill("not-yet")
    page.reload()
    page.get_by_role("button", name="Create a key").click()
    expect(page.get_by_label("Name", exact=True)).to_have_value("not-yet")


def test_a_revoked_key_signs_out(visitor, server):
    page = visitor.sign_in(create_key(server, "leaver", "models:read", "metrics"))
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    expect(page.get_by_text("Waiting for the first figures")).to_have_count(0)
    assert server.http.delete("/admin/v1/keys/leaver").status_code == 200
    expect(page.get_by_text("Your key is not valid any more.")).to_be_visible()
    expect(page.get_by_label("API key")).to_be_visible()


def test_signing_out_leaves_no_key_behind(operator):
    page = operator.page
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    page.reload()
    expect(page.get_by_label("API key")).to_be_visible()
    assert operator.page.context.cookies() == []


def test_signing_out_in_one_tab_signs_out_the_others(operator, server):
    operator.open("workers").get_by_role("heading", name="cpu-0").wait_for()
    other = operator.page.context.new_page()
    other.goto(f"{server.url}/console/#/keys")
    other.get_by_role("button", name="Sign out").click()
    for page in (other, operator.page):
        expect(page.get_by_label("API key")).to_be_visible()


def test_a_page_that_is_opened_offline_loads_when_the_line_is_back(operator):
    page = operator.open("models")
    expect(page.get_by_role("link", name="one", exact=True)).to_be_visible()
    page.context.set_offline(True)
    page.get_by_role("link", name="Keys").click()
    expect(page.get_by_role("alert")).to_contain_text("the server cannot be reached")
    page.context.set_offline(False)
    expect(page.get_by_role("region", name="API keys")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_killed_gateway_is_told_and_recovered_from(operator, server):
    page = operator.open()
    expect(page.get_by_text("Waiting for the first figures")).to_have_count(0)
    lost = page.get_by_text("The server does not answer.")
    # The supervisor starts another gateway soon: the page itself remembers what it told.
    page.evaluate(
        """() => new MutationObserver(() => {
            window.told ||= document.body.innerText.includes("The server does not answer.");
        }).observe(document.body, {childList: true, subtree: true})"""
    )
    os.kill(server.pids()["gateway-0"], signal.SIGKILL)
    wait_until(lambda: page.evaluate("window.told"), what="the page tells that the server is lost")
    expect(lost).to_have_count(0)
    server.reconnect()
    wait_until(lambda: calls_shown(page, server), what="figures of the new gateway")


def calls_shown(page: Page, server: Stack) -> bool:
    """Call a model, and return whether the page shows its traffic."""
    infer(server, "one", server.key)
    row = page.get_by_role("region", name="endpoints").get_by_role("row").filter(has_text="one")
    return row.count() == 1 and row.get_by_role("cell").nth(2).inner_text() not in {"–", "0/s"}
