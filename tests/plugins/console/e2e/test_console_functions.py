"""Functions and graphs in the console: code, environment, errors, and steps with their times, all of it as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.kit import models
from tests.kit.browser import visiting
from tests.kit.stack import Stack
from tests.kit.wait import wait_until
from tests.plugins.console.e2e.keys import create_key
from tests.plugins.console.e2e.test_console_pages import axe, serious, settled

__all__ = ["axe"]
pytestmark = pytest.mark.needs("chromium")
EVIL = '<img src=x onerror="window.hacked=1">'
CODE = f"""# {EVIL}</script>
def predict(text: str) -> str:
    if text == "fail":
        raise ValueError({EVIL!r})
    return text
"""
CASCADE: dict[str, Any] = {
    "inputs": {"x": None, EVIL: None},
    "steps": {
        "small": {"model": "one", "inputs": {"x": "x"}},
        "large": {"model": "other", "inputs": {"x": "x"}, "if": "max(small.y) < 10"},
        "never_again": {"model": "other", "inputs": {"x": ["large.y", "small.y"]}},
        "fails": {"model": "lookup", "inputs": {"index": EVIL}},
    },
    "outputs": {"y": ["large.y", "small.y"], "twice": "never_again.y", "found": "fails.y"},
}


def infer(server: Stack, model: str, outputs: list[str], **tensors: Any) -> int:
    datatypes = {str: "BYTES", float: "FP32", int: "INT64"}
    inputs = [
        {"name": name, "shape": [1, len(data)], "datatype": datatypes[type(data[0])], "data": data}
        for name, data in tensors.items()
    ]
    body = {"inputs": inputs, "outputs": [{"name": name} for name in outputs]}
    return int(server.http.post(f"/v2/models/{model}/infer", json=body).status_code)


@pytest.fixture(scope="module")
def furnished(server: Stack, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    folder = tmp_path_factory.mktemp("models")
    (folder / "service.py").write_text(CODE)
    server.push("echo", folder / "service.py")
    server.push("lookup", models.failing(folder / "lookup.onnx"))
    (folder / "graph.json").write_text(json.dumps(CASCADE))
    server.push("cascade", folder / "graph.json")
    body = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["fail"]}]}
    assert server.http.post("/v2/models/echo/infer", json=body).status_code == 500
    index = {EVIL: [99]}
    assert infer(server, "cascade", ["y", "twice"], x=[1.0, 2.0], **{EVIL: [1]}) == 200
    assert infer(server, "cascade", ["found"], x=[1.0, 2.0], **index) == 500
    return server


def unharmed(page: Page) -> None:
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[src=x]").count() == 0


def test_a_function_shows_code_environment_and_errors(operator, furnished):
    page = operator.open("models", "echo", query="?tab=function")
    expect(page.get_by_label("code of the function")).to_contain_text(EVIL)
    expect(page.get_by_text("Those of the server: it declares none.")).to_be_visible()
    expect(page.get_by_text("network and other processes: none")).to_be_visible()
    page.get_by_role("tab", name="Summary").click()
    errors = page.get_by_role("region", name="last errors")
    expect(errors).to_contain_text(f"ValueError: {EVIL} (service.py, line 4)")
    unharmed(page)


def test_who_may_not_change_a_function_sees_neither_code_nor_errors(visitor, furnished):
    visitor.sign_in(create_key(furnished, "reader", "models:read:*")).get_by_role("link", name="Models").wait_for()
    page = visitor.open("models", "echo", query="?tab=function")
    expect(page.get_by_text("Your key may not change this model, so it does not see its code.")).to_be_visible()
    page.get_by_role("tab", name="Summary").click()
    expect(page.get_by_text("None is known.")).to_be_visible()
    assert EVIL not in page.content()


def test_a_graph_is_drawn_and_told_as_a_table(operator, furnished):
    page = operator.open("models", "cascade", query="?tab=graph")
    drawing = page.get_by_role("img", name="graph of 4 steps")
    expect(drawing.locator("rect.step")).to_have_count(4)
    expect(drawing.locator(".edge.condition")).to_have_count(1)
    expect(drawing.locator("text.wrong")).to_have_text(["1 failed"])
    table = page.get_by_role("region", name="steps of the graph")
    row = table.get_by_role("row").filter(has_text="never_again")
    expect(row).to_contain_text("x = large.y or small.y")
    expect(row.get_by_role("cell").nth(3)).to_have_text("1")
    expect(table.get_by_role("row").filter(has_text="fails").get_by_text("1 model")).to_be_visible()
    expect(table.get_by_role("row").filter(has_text="fails")).to_contain_text(f"index = {EVIL}")
    unharmed(page)
    row.get_by_role("link", name="other").click()
    expect(page.get_by_role("heading", name="Version 1", exact=True)).to_be_visible()


def test_other_models_have_neither_tab(operator, furnished):
    page = operator.open("models", "one")
    expect(page.get_by_role("tab", name="Summary")).to_be_visible()
    expect(page.get_by_role("tab", name="Steps")).to_have_count(0)
    expect(page.get_by_role("tab", name="Function")).to_have_count(0)


def test_the_upload_page_says_what_code_needs(writer, furnished, tmp_path: Path):
    page = writer.open("upload")
    path = tmp_path / "service.py"
    path.write_text("def predict(text: str) -> str:\n    return text\n")
    expect(
        page.get_by_text("the key 'writing' lacks the scope 'models:code'").or_(page.get_by_text("models:code").first)
    ).to_be_visible()
    page.get_by_label("Model file").set_input_files(path)
    expect(page.get_by_role("status")).to_contain_text("lacks the scope 'models:code'")
    wait_until(lambda: page.get_by_label("Name", exact=True).input_value() == "service", what="it has a name")


@pytest.mark.needs("npm")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_of_functions_and_graphs_on_any_screen(browser, furnished, axe, dark):
    with visiting(browser, furnished.url, dark=dark, width=360) as visitor:
        visitor.sign_in(furnished.key).get_by_role("link", name="Audit").wait_for()
        found = []
        for name, tab in (("echo", "function"), ("cascade", "graph")):
            page = visitor.open("models", name, query=f"?tab={tab}")
            settled(page)
            found += serious(page, axe, tab)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, tab
        assert found == []
