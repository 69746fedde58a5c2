"""The admin API about placement: who holds what, and the settings of endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from millstream import AsyncClient, Client
from millstream.client.cli.placement import _rows_max, _show
from millstream.services.model.manifest import ModelConfig
from millstream.services.repository.folder import FolderRepository
from tests.kit import v2
from tests.kit.command_line import Millstream
from tests.kit.models import weighty
from tests.kit.stack import Stack, running_stack
from tests.kit.versions import publish_simulated
from tests.kit.wait import wait_until
from tests.kit.worker_process import running_worker

SIZE = 16 << 20  # a small model may find memory that its worker has already, and be measured as of no bytes
LEASE = {"queue_lease_s": 120}  # a worker that is paused for less is listed all the time


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("placement")
    path = weighty(folder / "weighty.onnx", SIZE)
    with running_stack(folder, controller=True, settings=LEASE, models={"first": path, "second": path}) as started:
        wait_until(lambda: started.metrics().value("millstream_controller_leads") == 1, what="leads")
        yield started


def placement(stack: Stack, **query: Any) -> dict[str, Any]:
    reply = stack.http.get("/admin/v1/placement", params=query)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def configure(stack: Stack, name: str, **settings: Any) -> dict[str, Any]:
    reply = stack.http.patch(f"/admin/v1/models/{name}", json=settings)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def refused(stack: Stack, name: str, document: Any, status: int = 400) -> str:
    reply = stack.http.patch(f"/admin/v1/models/{name}", json=document)
    assert reply.status_code == status, reply.text
    return str(reply.json()["error"])


def test_each_worker_and_each_version_is_listed(stack):
    found = placement(stack)
    assert found["leader"]["name"].startswith("controller-")
    assert found["next_page_token"] is None
    [worker] = found["workers"]
    assert (worker["pool"], worker["draining"], worker["instances_total"]) == ("cpu", False, 2)
    assert [(one["model"], one["version"], one["state"]) for one in worker["instances"]] == [
        ("first", 1, "ready"),
        ("second", 1, "ready"),
    ]
    assert [(one["model"], one["holders"], one["pools"], one["standby"]) for one in found["models"]] == [
        ("first", [worker["id"]], ["cpu"], False),
        ("second", [worker["id"]], ["cpu"], False),
    ]


def loaded(stack, count):
    [worker] = placement(stack)["workers"]
    return worker["instances"] if len(worker["instances"]) == count else [{"size_bytes": 0}]


def planned(stack, command, arguments):
    """The plan and the worker, if what the plan is made from did not change meanwhile: sizes are measured anew."""
    [before], found, [after] = placement(stack)["workers"], command.json(*arguments), placement(stack)["workers"]
    return (found, after) if figures(before) == figures(after) else None


def figures(worker):
    return worker["room_bytes"], worker["budget_bytes"], [one["size_bytes"] for one in worker["instances"]]


def test_a_plan_is_made_from_the_running_server_or_its_repository(stack, tmp_path):
    command = Millstream(stack.home)
    trace = tmp_path / "calls.csv"
    trace.write_text("model,seconds\n" + "".join(f"{('first', 'second')[at % 2]},{at * 20}\n" for at in range(100)))
    server = ("plan", "--models", "server", "--endpoint", stack.url, "--trace", trace)
    wait_until(lambda: all(one["size_bytes"] for one in loaded(stack, 2)), what="both are loaded and measured")
    configure(stack, "first", instances_min=1)
    with Client(stack.url, key=stack.key) as client:
        counts = [one["inference_stats"]["success"]["count"] for one in client.statistics()]
    assert len(counts) == 2
    found, worker = wait_until(lambda: planned(stack, command, server), what="a plan of what is still measured")
    assert (found["models"], found["models_measured"], found["workers"]) == (2, 2, 1)
    assert found["models_bytes"] == sum(one["size_bytes"] for one in worker["instances"])
    assert found["memory_bytes"] == worker["room_bytes"] < worker["budget_bytes"]
    assert found["policies"][0]["calls"] == 75
    assert found["policies"][0]["planned"].get("minimum", 0) == 0, "it was loaded before the counted part"
    larger = command.json(*server, "--workers", 3, "--memory", "4GiB")
    assert (larger["workers"], larger["memory_bytes"]) == (3, 4 << 30)

    for folder in (stack.home, stack.home / "repository"):
        read = command.json("plan", "--models", folder, "--trace", trace)
        assert (read["models"], read["models_measured"]) == (2, 2)
        assert (read["workers"], read["memory_bytes"]) == (2, 8 << 30)
    shown = command.ok("plan", "--models", stack.home, "--trace", trace, "--memory", "1GiB")
    assert shown.startswith("models: 2, together ")
    configure(stack, "first", instances_min=None)


def test_a_plan_that_cannot_be_made_says_why(stack, tmp_path):
    command = Millstream(stack.home)
    assert "no folder 'models'" in command.fails("plan", "--models", tmp_path, code=2)
    (tmp_path / "models").mkdir()
    assert "no model of it serves" in command.fails("plan", "--models", tmp_path, code=2)
    trace = tmp_path / "calls.csv"
    trace.write_text("model,seconds\nthird,1\n")
    server = ("plan", "--models", "server", "--endpoint", stack.url)
    assert "row 1: there is no model 'third'" in command.fails(*server, "--trace", trace, code=2)
    nobody = command.fails("plan", "--models", "server", "--endpoint", "http://127.0.0.1:9", code=1)
    assert "127.0.0.1:9" in nobody


def test_one_model_and_pages(stack):
    only = placement(stack, model="second")
    assert [one["model"] for one in only["models"]] == ["second"]
    assert [[one["model"] for one in worker["instances"]] for worker in only["workers"]] == [["second"]]
    page = placement(stack, limit=1)
    assert ([one["model"] for one in page["models"]], page["next_page_token"]) == (["first"], "first")
    assert [worker["instances_total"] for worker in page["workers"]] == [2]
    last = placement(stack, limit=1, page_token="first")
    assert ([one["model"] for one in last["models"]], last["next_page_token"]) == (["second"], None)
    assert (
        stack.http.get("/admin/v1/placement", params={"model": "secnd"})
        .json()["error"]
        .endswith("did you mean 'second'?")
    )
    for query in ({"limit": 0}, {"limit": 1001}, {"page_token": "a/b"}, {"page_token": "9" * 300}):
        assert stack.http.get("/admin/v1/placement", params=query).status_code == 400


def test_settings_are_changed_kept_and_restored(stack):
    before = configure(stack, "first")
    assert before["settings"] == {
        "pools": [],
        "instances_min": 0,
        "instances_max": 0,
        "idle_s": 0.0,
        "pin": False,
        "owner": "",
        "labels": {},
    }
    changed = configure(stack, "first", instances_min=1, pin=True)
    assert changed["generation"] == before["generation"] + 1
    assert changed["warnings"] == []
    again = configure(stack, "first", pools=["cpu"], pin=True)
    assert (again["settings"]["instances_min"], again["settings"]["pools"]) == (1, ["cpu"])
    assert configure(stack, "first", pin=True)["generation"] == again["generation"]  # nothing changed
    [version] = placement(stack, model="first")["models"]
    assert version["settings"] == again["settings"]
    [worker] = placement(stack, model="first")["workers"]
    assert worker["instances"][0]["pinned"]
    restored = configure(stack, "first", pools=None, instances_min=None, pin=None)
    assert restored["settings"] == before["settings"]
    assert stack.http.get("/admin/v1/models/first/settings").json() == restored
    assert "configured: first, instances_min 1, pin True" in stack.logs()


def test_what_has_no_effect_is_said(stack):
    found = configure(stack, "second", instances_min=3)
    assert found["warnings"] == ["instances_min is 3, and its pools have 1 workers now"]

    def missing():
        [version] = stack.http.get("/admin/v1/placement", params={"model": "second"}).json()["models"]
        return version["missing"]

    found = wait_until(missing, what="the gateway follows the settings")
    assert " of 3 instances are ready: " in found
    said = " ".join(Millstream(stack.home).ok("placement", "second", "--endpoint", stack.url).split())
    assert " of 3 instances are ready: " in said.partition("missing ")[2]
    stack.redis.sadd(f"ms:3:{{{stack.installation}}}:pools", "gpu")  # its workers are gone
    found = configure(stack, "second", pools=["gpu", "cpu"], instances_min=None)
    assert found["warnings"] == ["pool gpu has no worker now"]
    configure(stack, "second", pools=None)
    stack.redis.srem(f"ms:3:{{{stack.installation}}}:pools", "gpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"instances_min": 3, "instances_max": 2}, "instances_min is 3, more than instances_max, which is 2"),
        ({"pin": True, "idle_s": 60}, "pin keeps an instance loaded, idle_s unloads it: set one of them"),
        ({"instance_min": 1}, "there is no setting 'instance_min': did you mean 'instances_min'"),
        ({"pools": ["cpuu"]}, "pools: there is no pool 'cpuu'; the pool is cpu"),
        ({"pools": ["cpu", "cpu"]}, "pools: each pool is named once"),
        ({"pools": ["a b"]}, "pools"),
        ({"pools": "cpu"}, "pools: "),
        ({"instances_min": -1}, "instances_min: "),
        ({"instances_min": "many"}, "instances_min: "),
        ({"instances_min": "1"}, "instances_min: "),
        ({"instances_min": True}, "instances_min: "),
        ({"pin": 1}, "pin: "),
        ({"pin": "yes"}, "pin: "),
        ({"idle_s": 1e300}, "idle_s: "),
        ([], "the body is not a JSON object"),
    ],
)
def test_wrong_settings_are_refused_and_change_nothing(stack, settings, message):
    before = stack.http.get("/admin/v1/models/second/settings").json()
    assert message in refused(stack, "second", settings)
    assert stack.http.get("/admin/v1/models/second/settings").json() == before


def test_settings_of_an_unknown_model(stack):
    assert "did you mean 'second'" in refused(stack, "secnd", {"pin": True}, 404)


def test_the_client_reads_all_pages_and_changes_settings(stack, monkeypatch):
    monkeypatch.setattr("millstream.client.models.PLACEMENT_MODELS_MAX", 1)
    with Client(stack.url, key=stack.key) as client:
        found = client.placement()
        assert [one["model"] for one in found["models"]] == ["first", "second"]
        assert [[one["model"] for one in worker["instances"]] for worker in found["workers"]] == [["first", "second"]]
        assert client.configure("first", pools=["cpu"], idle_s=60)["settings"]["idle_s"] == 60
        assert client.configure("first", pools=[], idle_s=0)["settings"] == client.settings("first")["settings"]

    async def again() -> list[str]:
        async with AsyncClient(stack.url, key=stack.key) as client:
            return [one["model"] for one in (await client.placement("second"))["models"]]

    assert asyncio.run(again()) == ["second"]


def test_models_that_come_and_go_between_two_pages_hide_no_others(stack):
    assert placement(stack, limit=1, page_token="aaa")["models"][0]["model"] == "first"  # it was deleted meanwhile
    assert placement(stack, limit=1, page_token="fir")["models"][0]["model"] == "first"
    assert placement(stack, page_token="zzz")["models"] == []


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_command_shows_who_holds_what(stack, columns):
    millstream = Millstream(stack.home)
    code, said = millstream.in_terminal(["placement"], columns)
    assert code == 0, said
    assert max(map(len, said.splitlines())) <= columns
    assert "controller-" in said
    assert "cpu-0" in said
    assert ("first 1" in said, "second 1" in said) == (True, True)
    assert ("█" in said or "░" in said) is (columns >= 80)
    assert ("LOAD" in said) is (columns == 120)


def test_the_command_shows_and_changes_settings(stack):
    millstream = Millstream(stack.home)
    assert "no limit" in millstream.ok("configure", "second")
    done = millstream.run("configure", "second", "--instances-min", 2, "--instances-max", 2, "--no-pin")
    assert (done.returncode, done.stderr) == (0, "warning: instances_min is 2, and its pools have 1 workers now\n")
    assert "at least 2, at most 2 in a pool" in millstream.ok("placement", "second")
    assert millstream.json("placement", "second")["models"][0]["settings"]["instances_min"] == 2
    assert "idle_s unloads it" in millstream.fails("configure", "second", "--pin", "--idle-s", 5)
    assert "there is no pool 'x'" in millstream.fails("configure", "second", "--pools", "x")
    found = millstream.json("configure", "second", "--pools", "", "--instances-min", 0, "--instances-max", 0)
    assert found["settings"] == {
        "pools": [],
        "instances_min": 0,
        "instances_max": 0,
        "idle_s": 0.0,
        "pin": False,
        "owner": "",
        "labels": {},
    }


@pytest.fixture(scope="module")
def tight(stack: Stack) -> Iterator[list[str]]:
    """Four models in a pool with memory for one of 200 MiB: one is loaded, two are on standby, one cannot be loaded."""
    repository = FolderRepository(stack.home / "repository")
    config = ModelConfig(pools=("tight",))
    names = ["t-blue", "t-green", "t-red"]
    for name in names:
        publish_simulated(repository, name, {"bytes": 200 << 20, "load_s": 0.01}, config=config)
    publish_simulated(repository, "t-broken", {"load": "fail"}, config=config)
    with running_worker(stack, "tight", settings={"worker_memory": "350MiB", **LEASE}):
        wait_until(lambda: "pending" not in states(stack, [*names, "t-broken"]), what="the worker knows them")
        wait_until(lambda: call(stack, "t-broken") == 503 and states(stack, ["t-broken"]) == ["failed"], what="failed")
        wait_until(lambda: call(stack, "t-blue") == 200, what="loaded")
        wait_until(lambda: states(stack, names) == ["ready", "standby", "standby"], what="one of three is loaded")
        yield names
    for name in [*names, "t-broken"]:
        stack.http.delete(f"/admin/v1/models/{name}")


def states(stack: Stack, names: list[str]) -> list[str]:
    return sorted(one["state"] for one in placement(stack)["models"] if one["model"] in names)


def test_what_is_not_loaded_and_why(stack, tight):
    versions = {one["model"]: one for one in placement(stack)["models"]}
    broken = versions["t-broken"]
    assert (broken["holders"], broken["standby"], broken["load"]) == ([], False, None)
    [failed] = broken["failed"]
    assert "the load fails" in failed["reason"]
    held = next(versions[name] for name in tight if not versions[name]["standby"])
    assert (held["holders"], held["failed"], held["load"]) == ([failed["worker"]], [], None)
    waiting = next(versions[name] for name in tight if versions[name]["standby"])
    assert waiting["holders"] == []
    assert waiting["load"]["pool"] == "tight"
    assert waiting["load"]["load_s"] > 0
    [worker] = [one for one in placement(stack)["workers"] if one["pool"] == "tight"]
    assert worker["instances_total"] == 1  # the failed one takes nothing

    wait_until(lambda: call(stack, waiting["model"]) == 200, what="loaded in place of the other")

    def unloaded() -> Any:
        [version] = [one for one in placement(stack)["models"] if one["model"] == held["model"]]
        return version["standby"] and version["load"]

    load = wait_until(unloaded, what="on standby")
    wait_until(lambda: states(stack, tight) == ["ready", "standby", "standby"], what="one of three is loaded")
    assert load["measured"]
    assert load["size_bytes"] >= 200 << 20


def call(stack: Stack, name: str) -> int:
    body, headers = v2.request({"x": np.ones((1, 4), np.float32)})
    return stack.http.post(f"/v2/models/{name}/infer", content=body, headers=headers).status_code


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_command_shows_what_is_not_loaded(stack, tight, columns):
    code, said = Millstream(stack.home).in_terminal(["placement"], columns)
    assert code == 0, said
    assert max(map(len, said.splitlines())) <= columns
    assert "on standby  2 versions" in said
    assert said.count("t-broken 1") == 1  # listed with the failures, not with what the worker has
    assert "failed       t-broken 1 in tight-0" in said
    assert "the load fails" in " ".join(said.split())


def test_pictures_fit_the_height_of_the_terminal():
    found: Any = {"workers": [{}, {}], "models": [{"standby": True}]}
    assert _rows_max(50, found) == 11
    assert _rows_max(10, found) == 3


def test_a_thousand_models_are_shown_whole_or_with_their_number(capsys):
    versions: Any = [
        {"model": f"m-{number:04d}", "version": 1, "standby": True, "holders": [], "failed": [], "refusals": []}
        | {"load": {"size_bytes": 4 << 20, "load_s": 0.5, "measured": number == 0}}
        for number in range(1000)
    ]
    console = Console(width=80, file=None)
    _show(console, {"leader": None, "workers": [], "models": versions, "next_page_token": None}, None, 10)
    said = capsys.readouterr().out
    assert "on standby  1000 versions" in said
    assert "and 990 more" in said
    _show(console, {"leader": None, "workers": [], "models": versions, "next_page_token": None}, None, None)
    said = capsys.readouterr().out
    assert said.count("m-") == 1000
    assert said.count("~4.0 MiB") == 999
