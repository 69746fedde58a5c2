"""Models that crash, or never end, while they are loaded: everything else loads and serves, also after a restart."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from millstream.services.repository.folder import FolderRepository
from tests.kit import models, v2
from tests.kit.load import constant_load
from tests.kit.stack import Stack, running_stack
from tests.kit.versions import publish_model
from tests.kit.wait import wait_until

ROW = np.ones((1, 2), np.float32)
STEADY = "/v2/models/steady/infer"
STEADY_CALL = v2.request({"x": ROW}, parameters={"timeout": 110_000_000})  # microseconds: workers start slowly at times
#: Of every model, so also of those that warm up at once on an idle machine. Longer than a load takes to be set aside:
#: the others are loaded meanwhile, long before the worker ends and makes suspects of what it loads just then.
WARM_UP_S_MAX = 20


def repository(tmp_path: Path) -> FolderRepository:
    return FolderRepository(tmp_path / "home" / "repository")


def version(stack: Stack, model: str) -> dict[str, Any]:
    document: dict[str, Any] = stack.http.get(f"/admin/v1/models/{model}/versions/1").json()
    return document


def failed(stack: Stack, model: str) -> str:
    """Wait until a model is failed, for every gateway and readiness probe; the reason. It may be tried again before."""

    def reason() -> str | None:
        document = version(stack, model)
        if document["state"] != "failed":
            return None
        probe = stack.http.get(f"/v2/models/{model}/ready")
        said: str = document["reason"]
        return said if probe.status_code == 503 and said in probe.json()["error"] else None

    return wait_until(reason, what=f"{model} is failed, and a probe says so")


def failed_at(tmp_path: Path, model: str) -> float:
    """When a model was failed, in seconds since the epoch; 0: it is not failed."""
    known = repository(tmp_path)
    return known.verdicts.of(known.manifest(model, 1)).on("onnxruntime.cpu").failed_at


def warming(stack: Stack, model: str) -> bool:
    return bool(version(stack, model)["state"] == "warming")


def ended(stack: Stack) -> list[str]:
    """What was said about workers that ended by themselves."""
    return [line for line in stack.lines if line.startswith("cpu-") and "restarting it" in line]


def until_ended(stack: Stack, times: int) -> None:
    """Wait until so many ends of workers were told: that comes after the reason is published."""
    wait_until(lambda: len(ended(stack)) == times, what=f"{times} workers ended")


def answers(stack: Stack, model: str = "steady") -> None:
    body, headers = STEADY_CALL
    reply = stack.http.post(f"/v2/models/{model}/infer", content=body, headers=headers)
    assert reply.status_code == 200, reply.text


def test_a_model_that_crashes_workers_while_it_is_loaded(tmp_path: Path) -> None:
    publish_model(repository(tmp_path), "deadly", models.crashing(tmp_path / "deadly.onnx"))
    steady = {"steady": models.scale(tmp_path / "steady.onnx")}
    with running_stack(tmp_path, pools="cpu=2", models=steady) as stack:
        assert "processes died while they loaded it" in failed(stack, "deadly")
        assert 1 <= len(ended(stack)) <= 3
        assert all("was ended by SIGFPE: restarting it at once" in line for line in ended(stack))
        stack.settled("steady", 1)
        answers(stack)
        refused = stack.http.post("/v2/models/deadly/infer", json={"inputs": []})
        assert refused.status_code in {400, 503}

    # It is known, so no process dies of it again.
    with running_stack(tmp_path, pools="cpu=2", models=steady) as stack:
        stack.settled("steady", 1)
        assert "processes died" in failed(stack, "deadly")
        assert ended(stack) == []
        stack.push("another", models.scale(tmp_path / "another.onnx", 3.0))

        # An operator wants it tried again, and it comes to the same.
        before = failed_at(tmp_path, "deadly")
        assert stack.http.post("/admin/v1/models/deadly/versions/1/activate").status_code == 200
        wait_until(lambda: failed_at(tmp_path, "deadly") > before, what="it failed once more")
        assert "processes died" in failed(stack, "deadly")

        # The same number with other files is another version.
        assert stack.http.delete("/admin/v1/models/deadly/versions/1?force=true").status_code == 204
        stack.push("deadly", steady["steady"], version=1)
        answers(stack, "deadly")
        stack.settled("another", 1)


def test_a_suspect_is_tried_in_a_process_of_its_own(tmp_path: Path) -> None:
    publish_model(repository(tmp_path), "deadly", models.crashing(tmp_path / "deadly.onnx"))
    steady = {"steady": models.scale(tmp_path / "steady.onnx")}
    with running_stack(tmp_path, models=steady) as stack:
        assert "2 processes died while they loaded it, the last was ended by SIGFPE" in failed(stack, "deadly")
        assert len(ended(stack)) == 1, "the second death was that of a process that serves nothing"
        stack.settled("steady", 1)
        answers(stack)


def test_warm_ups_that_never_end_stop_no_other_load(tmp_path: Path) -> None:
    known = repository(tmp_path)
    publish_model(known, "a-endless", models.endless(tmp_path / "endless.onnx"))
    publish_model(known, "b-unstoppable", models.unstoppable(tmp_path / "unstoppable.onnx"))
    steady = {"steady": models.scale(tmp_path / "steady.onnx")}
    with running_stack(tmp_path, models=steady) as stack:
        stack.settled("steady", 1)
        for model in ("a-endless", "b-unstoppable"):
            wait_until(partial(warming, stack, model), what=f"{model} warms up")
        assert ended(stack) == []
        with constant_load(stack.port, STEADY, [STEADY_CALL], callers=1) as load:
            pid = stack.pids()["cpu-0"]
            assert stack.http.delete("/admin/v1/models/a-endless").status_code == 204
            stack.push("next", models.scale(tmp_path / "next.onnx", 3.0))
            load.more(5)
            assert stack.pids()["cpu-0"] == pid
            # This one cannot be ended but with its process.
            assert stack.http.delete("/admin/v1/models/b-unstoppable").status_code == 204
            stack.wait_for_line("cpu-0 ended with exit code 5: restarting it at once")
            stack.settled("next", 1)
            load.more(5)
        assert {reply.status for reply in load.answers} == {200}


def test_warm_ups_that_take_too_long_fail_their_version_for_good(tmp_path: Path) -> None:
    known = repository(tmp_path)
    publish_model(known, "a-endless", models.endless(tmp_path / "endless.onnx"))
    publish_model(known, "b-unstoppable", models.unstoppable(tmp_path / "unstoppable.onnx"))
    steady = {"steady": models.scale(tmp_path / "steady.onnx")}
    with running_stack(tmp_path, models=steady, settings={"worker_load_s_max": 2 * WARM_UP_S_MAX}) as stack:
        for model in ("a-endless", "b-unstoppable"):
            assert failed(stack, model) == f"warming up took longer than {WARM_UP_S_MAX} s"
        stack.wait_for_line("cpu-0 ended with exit code 5: restarting it at once")
        stack.settled("steady", 1)
        answers(stack)
    with running_stack(tmp_path, models=steady) as stack:
        for model in ("a-endless", "b-unstoppable"):
            assert failed(stack, model) == f"warming up took longer than {WARM_UP_S_MAX} s"
        stack.settled("steady", 1)
        assert ended(stack) == []


def test_a_load_that_waits_for_such_a_model_ends_with_the_reason(tmp_path: Path) -> None:
    known = repository(tmp_path)
    publish_model(known, "endless", models.endless(tmp_path / "endless.onnx"))
    steady = {"steady": models.scale(tmp_path / "steady.onnx")}
    with running_stack(tmp_path, models=steady, settings={"worker_load_s_max": 2 * WARM_UP_S_MAX}) as stack:
        reasons = {
            "deadly": "processes died while they loaded it",
            "endless": f"warming up took longer than {WARM_UP_S_MAX} s",
        }
        assert reasons["endless"] in failed(stack, "endless")
        # Not before: the death of a worker makes a suspect of what it loads just then.
        publish_model(known, "deadly", models.crashing(tmp_path / "deadly.onnx"))
        wait_until(lambda: "state" in version(stack, "deadly"), what="deadly is known")
        assert reasons["deadly"] in failed(stack, "deadly")
        for deaths, (model, reason) in enumerate(reasons.items(), 1):
            until_ended(stack, deaths)  # one at the start, one for the operator

            # As `millstream up` asks: it is not tried again.
            reply = stack.http.post(f"/v2/repository/models/{model}/load?retry=false")
            assert (reply.status_code, reason in reply.json()["error"]) == (400, True), reply.text
            assert len(ended(stack)) == deaths

            # As an operator asks: it is, and comes to the same.
            reply = stack.http.post(f"/v2/repository/models/{model}/load")
            assert (reply.status_code, reason in reply.json()["error"]) == (400, True), reply.text
        assert len(ended(stack)) == 2, "the endless one is ended without a death"
        stack.settled("steady", 1)
        answers(stack)


def test_a_start_does_not_fail_for_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"not a model")
    with running_stack(tmp_path, models={"broken": broken, "steady": models.scale(tmp_path / "steady.onnx")}) as stack:
        stack.wait_for_line("broken is not served")
        answers(stack)
