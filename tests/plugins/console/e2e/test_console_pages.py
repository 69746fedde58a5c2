"""What each page of the console shows, in a real browser, on any screen and whatever names there are."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from urllib.parse import quote

import onnx
import pytest
from playwright.sync_api import Page, expect

from tests.kit import models
from tests.kit.browser import Visitor, visiting
from tests.kit.stack import Stack
from tests.kit.tools import program
from tests.kit.wait import wait_until
from tests.plugins.console.e2e.keys import infer

pytestmark = pytest.mark.needs("chromium")
WEB = Path(__file__).parents[4] / "plugins" / "console" / "web"
TABS = [f"models/one?tab={tab}" for tab in ("try", "versions", "race", "where", "settings", "code", "keys")]
PAGES = ["", "models", "models/one", *TABS, "upload", "workers", "scaling", "requests", "logs", "keys", "audit"]
_LOADS = "/Loading…|Waiting for the first|connecting/.test(document.body.innerText)"
HOSTILE = '<img src=x onerror="window.hacked=1">'


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, in the version of the page's lock file."""
    script = Path("node_modules", "axe-core", "axe.min.js")
    web = WEB
    if not (web / script).exists():
        web = tmp_path_factory.mktemp("web")  # alone: what builds the page takes longer
        version = json.loads((WEB / "package-lock.json").read_text())["packages"]["node_modules/axe-core"]["version"]
        flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-save", "--prefer-offline"]
        subprocess.run([program("npm"), "install", *flags, f"axe-core@{version}"], cwd=web, check=True)
    return (web / script).read_text()


def shown(visitor: Visitor, name: str) -> Page:
    """Open a page of `PAGES`."""
    path, mark, query = name.partition("?")
    return visitor.open(*path.split("/"), query=mark + query)


def settled(page: Page) -> None:
    """Wait until a page has shown what it loads first."""
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    wait_until(lambda: not page.evaluate(_LOADS), what="the page has loaded")


@pytest.mark.needs("npm")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_serious(browser, server, axe, dark):
    infer(server, "one", server.key)
    found = []
    with visiting(browser, server.url, dark=dark) as visitor:
        visitor.open("sign-in")
        found += serious(visitor.page, axe, "sign-in")
        visitor.sign_in(server.key).get_by_role("link", name="Audit").wait_for()
        for name in PAGES:
            settled(shown(visitor, name))
            found += serious(visitor.page, axe, name)
        visitor.open("keys").get_by_role("button", name="Create a key").click()
        found += serious(visitor.page, axe, "create a key")
    assert found == []


def serious(page: Page, axe: str, name: str) -> list[str]:
    page.evaluate(axe)
    results = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{name or 'overview'}: {one['id']}: {node['target']}: {node['failureSummary']}"
        for one in results["violations"]
        if one["impact"] in {"serious", "critical"}
        for node in one["nodes"]
    ]


def test_no_page_is_wider_than_a_telephone(browser, server):
    with visiting(browser, server.url, width=360) as visitor:
        visitor.sign_in(server.key).get_by_role("link", name="Audit").wait_for()
        wide = {}
        for name in PAGES:
            settled(shown(visitor, name))
            if (width := visitor.page.evaluate("document.documentElement.scrollWidth")) > 360:
                wide[name] = width
        assert wide == {}


def test_overview_shows_the_traffic_of_a_model_that_is_called(operator, server):
    page = operator.open()
    row = page.get_by_role("region", name="endpoints").get_by_role("row").filter(has_text="one")

    def seen() -> bool:
        infer(server, "one", server.key)
        return row.count() == 1 and row.get_by_role("cell").nth(2).inner_text() not in {"–", "0/s"}

    wait_until(seen, what="traffic of the model")


def test_workers_tell_who_holds_what_and_what_waits(operator, server):
    reply = server.http.patch("/admin/v1/models/other", json={"instances_min": 7})
    assert reply.status_code == 200, reply.text
    try:
        page = operator.open("workers")
        held = page.get_by_role("region", name="models in cpu-0")
        expect(held.get_by_role("link", name="one", exact=True)).to_be_visible()
        waiting = page.get_by_role("region", name="models that wait or were refused")
        expect(waiting.get_by_role("row").filter(has_text="other")).to_contain_text("of 7 instances are ready")
    finally:
        server.http.patch("/admin/v1/models/other", json={"instances_min": None})


def test_scaling_tells_how_many_workers_are_wanted_and_why(operator):
    page = operator.open("scaling")
    expect(page.get_by_role("heading", name="Pool cpu")).to_be_visible()
    expect(page.get_by_text("1 to 2")).to_be_visible()
    expect(page.get_by_label("decisions of pool cpu").get_by_role("row").nth(1)).to_be_visible()
    page.get_by_text("The arithmetic of this decision").click()
    expect(page.get_by_label("arithmetic of pool cpu")).to_contain_text("wanted: ")


def test_audit_keeps_its_filters_in_the_address(operator, server):
    for labels in ({"a": "1"}, {"a": None}):
        assert server.http.patch("/admin/v1/models/one", json={"labels": labels}).status_code == 200
    page = operator.open("audit")
    page.get_by_label("Model, * for any characters").fill("one")
    page.get_by_label("Model, * for any characters").press("Enter")
    expect(page.get_by_role("row").filter(has_text="configure_model").first).to_be_visible()
    expect(page.get_by_role("row").filter(has_text="create_key")).to_have_count(0)
    page.reload()
    expect(page.get_by_label("Model, * for any characters")).to_have_value("one")
    expect(page.get_by_role("row").filter(has_text="configure_model").first).to_be_visible()
    expect(page.get_by_role("row").filter(has_text="create_key")).to_have_count(0)


def test_requests_tell_where_the_time_of_a_call_went(operator, server):
    page = operator.open("requests")
    settled(page)
    infer(server, "one", server.key)
    row = page.get_by_role("region", name="slowest requests").get_by_role("row").filter(has_text="/v2/models/one/infer")
    expect(row.first).to_contain_text("run ")


def test_log_lines_come_as_they_are_written_and_by_their_level(operator, server):
    page = operator.open("logs", query="?level=WARNING&process=gateway-0")
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    refused_upload(server, "nowhere")
    lines = page.get_by_role("log")
    expect(lines).to_contain_text("there is no pool 'nowhere'")
    assert "uploaded: one" not in lines.inner_text()


def test_hostile_names_and_lines_are_text(operator, server, tmp_path):
    """Names of tensors, models and pools, and what the audit log and the logs tell of them."""
    model = onnx.load(models.scale(tmp_path / "scale.onnx"))
    rename_input(model, HOSTILE)
    onnx.save(model, tmp_path / "hostile.onnx")
    server.push("hostile", tmp_path / "hostile.onnx")
    refused_upload(server, HOSTILE)
    server.http.patch(f"/admin/v1/models/{quote(HOSTILE, safe='')}", json={"pin": True})
    for place in (["models", "hostile"], ["audit"], ["logs"], ["models", HOSTILE]):
        page = operator.open(*place)
        settled(page)
        expect(page.get_by_text("onerror=").first).to_be_visible()
        assert page.evaluate("window.hacked") is None
        assert page.locator("img[src=x]").count() == 0


def refused_upload(server: Stack, pool: str) -> None:
    """Upload a version for a pool that there is not; the log tells of it."""
    query = {"config": json.dumps({"pools": [pool]})}
    assert server.http.post("/admin/v1/models/one/versions", params=query, content=b"model").status_code == 400


def rename_input(model: onnx.ModelProto, name: str) -> None:
    [old] = [one.name for one in model.graph.input]
    model.graph.input[0].name = name
    for node in model.graph.node:
        node.input[:] = [name if one == old else one for one in node.input]
