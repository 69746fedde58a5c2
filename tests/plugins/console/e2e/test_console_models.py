"""What a writer does with a model in the console: versions, loading, settings, races, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from millstream.plugins.compile.stored.job import Jobs, new_job
from millstream.services.repository.folder import FolderRepository
from tests.kit import models
from tests.kit.choices import KIND, choose
from tests.kit.stack import Stack
from tests.kit.wait import wait_until
from tests.plugins.console.e2e.keys import infer

pytestmark = pytest.mark.needs("chromium")


@pytest.fixture
def model(server: Stack, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A model of two versions, which multiply by 2 and by 3; the second one answers."""
    name = request.node.name.removeprefix("test_").replace("_", "-")[:40]
    for factor in (2.0, 3.0):
        server.push(name, models.scale(tmp_path / "model.onnx", factor))
    yield name
    server.http.delete(f"/admin/v1/models/{name}")


def answer(server: Stack, model: str) -> list[float]:
    reply = server.http.post(
        f"/v2/models/{model}/infer",
        json={"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]},
    )
    assert reply.status_code == 200, reply.text
    data: list[float] = reply.json()["outputs"][0]["data"]
    return data


def confirm(page: Page, action: str, *, means: str) -> None:
    """Answer a question with what it offers, after a look at what that means."""
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(means)
    dialog.get_by_role("button", name=action, exact=True).click()
    expect(dialog).to_have_count(0)


def test_versions_roll_back_and_forth_and_are_deleted(writer, server, model):
    page = writer.open("models", model)
    page.get_by_role("button", name="Roll back to 1").click()
    confirm(page, "Roll back", means="Version 2 answers until it is ready: no call fails in between.")
    expect(page.get_by_text("Version 1 answers.")).to_be_visible()
    assert answer(server, model) == [2.0, 4.0]
    page.get_by_role("tab", name="Versions").click()
    page.get_by_role("button", name="Activate version 2").click()
    confirm(page, "Activate", means="Calls without a version will be answered by version 2.")
    expect(page.get_by_text("Version 2 answers.")).to_be_visible()
    assert answer(server, model) == [3.0, 6.0]
    page.get_by_role("button", name="Delete version 1").click()
    confirm(page, "Delete for good", means="This cannot be undone, and its number is not used again.")
    expect(page.get_by_role("button", name="Delete version 1")).to_have_count(0)
    assert server.http.get(f"/admin/v1/models/{model}/versions/1").status_code == 404


def test_a_model_is_unloaded_loaded_and_pinned(writer, server, model):
    page = writer.open("models", model)
    page.get_by_role("button", name="Unload").click()
    confirm(page, "Unload", means="Its calls are refused until it is loaded again")
    expect(page.get_by_text("unloaded", exact=True)).to_be_visible()
    assert infer(server, model, server.key).status_code >= 400
    page.get_by_role("button", name="Load", exact=True).click()
    confirm(page, "Load", means="A worker loads it and it answers again.")
    expect(page.get_by_text("ready", exact=True).first).to_be_visible()
    assert answer(server, model) == [3.0, 6.0]
    page.get_by_role("tab", name="Settings").click()
    page.get_by_label("Pinned").check()
    page.get_by_label("Labels").fill("team=<b>vision</b>")
    page.reload()
    expect(page.get_by_label("Labels")).to_have_value("team=<b>vision</b>")
    page.get_by_role("button", name="Save…").click()
    page.get_by_role("dialog").get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("<b>vision</b>")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    page.get_by_label("Labels").fill("team=vision")
    page.get_by_role("button", name="Save…").click()
    confirm(page, "Save", means="pin: true")
    expect(page.get_by_text("Labels: team=vision.")).to_be_visible()
    assert server.http.get(f"/admin/v1/models/{model}/settings").json()["settings"]["pin"] is True


def test_a_model_is_deleted_after_a_look_at_what_that_means(writer, server, model):
    page = writer.open("models", model)
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert answer(server, model) == [3.0, 6.0]
    page.get_by_role("button", name="Delete", exact=True).click()
    confirm(page, "Delete for good", means="All of its 2 versions, what was compiled from them and its settings")
    expect(page.get_by_role("heading", name="Models", level=1)).to_be_visible()
    expect(page.get_by_role("link", name="one", exact=True)).to_be_visible()
    expect(page.get_by_role("link", name=model, exact=True)).to_have_count(0)
    assert server.http.get(f"/admin/v1/models/{model}").status_code == 404


@contextmanager
def no_race_begins(server: Stack, model: str) -> Iterator[None]:
    """Races wait, as if another one ran on the device."""
    repository = FolderRepository(server.home / "repository")
    [host] = {one["host"] for one in server.http.get("/admin/v1/workers").json()["workers"]}
    other = new_job(repository.manifest(model, 1), KIND, "another device", "cpu", 1.0)
    locks = wait_until(lambda: Jobs(repository).try_locks(other, host, "cpu"), what="the lock of the device")
    try:
        yield
    finally:
        for lock in locks:
            lock.release()


def test_a_race_takes_samples_and_options_and_is_cancelled(writer, server, model, tmp_path):
    page = writer.open("models", model, query="?tab=race")
    np.savez(tmp_path / "wrong.npz", other=np.ones((4, 2), np.float32))
    np.savez(tmp_path / "right.npz", x=np.ones((4, 2), np.float32))
    with no_race_begins(server, model):
        page.get_by_role("button", name="Start a race").click()
        page.get_by_label("Samples", exact=True).set_input_files(tmp_path / "wrong.npz")
        page.get_by_role("button", name="Start the race").click()
        expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("other")
        page.get_by_label("Samples", exact=True).set_input_files(tmp_path / "right.npz")
        page.get_by_text("Bounds, and who takes part").click()
        page.get_by_label("Least cosine of each output").fill("0.99")
        page.get_by_role("button", name="Start the race").click()
        page.get_by_role("button", name="Cancel the race").click()
        confirm(page, "Cancel the race", means="What serves now goes on serving.")
        expect(page.get_by_text("It was cancelled.")).to_be_visible()
    race = server.http.get(f"/admin/v1/models/{model}/versions/2/race").json()
    assert (race["state"], race["options"]["gate"]["cosine_min"]) == ("cancelled", 0.99)
    assert list((server.home / "repository" / "models" / model / "2").glob("race/*")), "the samples are kept"


def test_the_verdict_of_a_race_is_shown_and_undone(writer, server, model, tmp_path):
    choose(server, model, models.scale(tmp_path / "form.onnx", 2.0))
    page = writer.open("models", model, query="?tab=race&version=1")
    expect(page.get_by_text("serves now")).to_be_visible()
    expect(page.get_by_role("region", name="forms of the race")).to_contain_text("v-1")
    page.get_by_role("button", name="Undo the verdict").click()
    confirm(page, "Undo the verdict", means="Workers swap back without losing a call. It will be 2.00× slower again")
    expect(page.get_by_text("The verdict was taken back")).to_be_visible()
    expect(page.get_by_role("button", name="Undo the verdict")).to_have_count(0)
    assert server.http.get(f"/admin/v1/models/{model}/versions/1/race").json()["serving"] is False


def test_a_link_to_a_tab_leads_there_and_the_browser_goes_back(visitor, writing_key):
    page = visitor.open("models", "one", query="?tab=where")
    page.get_by_label("API key").fill(writing_key)
    page.get_by_role("button", name="Sign in").click()
    where = page.get_by_role("region", name="workers that hold the model")
    expect(where).to_contain_text("cpu-0")
    page.get_by_role("link", name="Models").click()
    expect(page.get_by_role("heading", name="Models", level=1)).to_be_visible()
    page.go_back()
    expect(where).to_be_visible()
    page.go_forward()
    expect(page.get_by_role("heading", name="Models", level=1)).to_be_visible()
    wait_until(lambda: page.title() == "Models · Millstream", what="the title of the page")
