"""Compiled forms that fail, hang, turn slow or end the process cost no request: the version's own file answers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2

from tests.kit import choices, v2
from tests.kit.choices import BAD, choose
from tests.kit.load import Load, constant_load
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

RACE = "/admin/v1/models/m/versions/1/race"
GOOD = [v2.request({"x": np.array([[n], [n + 1]], np.int64)}, parameters=v2.PATIENT) for n in range(4)]
SOME_BAD = [*GOOD, v2.request({"x": np.array([[BAD]], np.int64)}, parameters=v2.PATIENT)]
FORM = "millstream-form"
NO_CHECKS = {"live_check_one_in": 0}
RUN_S_MAX = 10  # a run that this machine lets wait must not seem endless


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running_stack(tmp_path, settings=NO_CHECKS) as stack:
        stack.push("m", choices.plain(tmp_path / "plain.onnx"))
        yield stack


def values(body: bytes, headers: Any) -> list[int]:
    return [int(one) for one in v2.outputs(body, dict(headers))["y"].ravel()]


@contextmanager
def load_on(stack: Stack, bodies: Any = GOOD, callers: int = 4) -> Iterator[Load]:
    """Load on the model during the block; each of its answers is right."""
    with constant_load(stack.port, "/v2/models/m/infer", bodies, callers=callers) as load:
        load.more(20)
        yield load
        load.more(20)
    for answer in load.answers:
        assert answer.status == 200, answer.body
        expected = [answer.sent, answer.sent + 1] if bodies[answer.sent] in GOOD else [BAD]
        assert values(answer.body, answer.headers) == expected


def race(stack: Stack) -> dict[str, Any]:
    document: dict[str, Any] = stack.http.get(RACE).json()
    return document


def served_by(stack: Stack) -> list[str | None]:
    """Return what serves in each worker."""
    document = stack.http.get("/admin/v1/models/m/versions/1").json()
    return [one["variant"] for one in document["instances"] if one["state"] == "ready"]


def is_served_by(stack: Stack, variant: str | None, workers: int = 1) -> None:
    wait_until(lambda: served_by(stack) == [variant] * workers, what=f"served by {variant}")


def undone(stack: Stack) -> str:
    """Wait until the verdict was taken back; return why."""
    wait_until(lambda: race(stack)["undone"], what="it is undone")
    is_served_by(stack, None)
    document = race(stack)
    assert document["serving"] is False
    assert document["report"], "the report stays"
    why: str = document["undone"]["why"]
    assert why in " ".join(stack.http.get("/admin/v1/models/m/versions/1").text.split())
    wait_until(lambda: stack.metrics().value("millstream_variants_undone_total"))
    return why


def test_a_winner_takes_over_and_goes_back_under_load_without_a_request_lost(stack: Stack, tmp_path: Path) -> None:
    with load_on(stack) as load:
        choose(stack, "m", choices.raising(tmp_path / "form.onnx"))
        is_served_by(stack, "by-hand")
        wait_until(lambda: stack.metrics().value("millstream_variants_swapped_total", model="m"), what="it is counted")
        load.more(50)
        reply = stack.http.post(f"{RACE}/undo")
        assert reply.status_code == 200, reply.text
        is_served_by(stack, None)
        load.more(50)
    assert stack.http.post(f"{RACE}/undo").status_code == 200, "twice is as good as once"
    assert race(stack)["undone"] == {"why": "it was asked for", "at": race(stack)["undone"]["at"], "automatic": False}


def test_a_form_that_raises_is_undone_and_its_request_is_answered(stack: Stack, tmp_path: Path) -> None:
    choose(stack, "m", choices.raising(tmp_path / "form.onnx"))
    is_served_by(stack, "by-hand")
    with load_on(stack, SOME_BAD):
        assert "it fails where the baseline does not" in undone(stack)


def test_a_form_that_answers_wrongly_is_undone_by_a_live_batch(tmp_path: Path) -> None:
    with running_stack(tmp_path) as stack:
        stack.push("m", choices.plain(tmp_path / "plain.onnx"))
        choose(stack, "m", choices.wrong(tmp_path / "form.onnx"))
        is_served_by(stack, "by-hand")

        def answer(*numbers: int) -> list[int]:
            body, headers = v2.request({"x": np.array(numbers, np.int64)[:, None]}, parameters=v2.PATIENT)
            reply = stack.http.post("/v2/models/m/infer", content=body, headers=headers)
            assert reply.status_code == 200, reply.text
            return values(reply.content, reply.headers)

        assert answer(1, 2, 3) == [1, 2, 3]
        wait_until(lambda: answer(5, BAD) == [5, BAD], what="the version's own file answers")
        why = undone(stack)
        assert "v-1 gave another answer to a live batch of 2 rows: output 'y': other values" in why
        checks = {"model": "m", "outcome": "form_differs"}
        wait_until(lambda: stack.metrics().value("millstream_batch_checks_total", **checks) == 1)
        assert "the form serves no longer" in (stack.home / "logs" / "cpu-0.log").read_text()
        assert answer(BAD, 0) == [BAD, 0]


def test_a_reply_names_the_form_that_made_it_with_version_and_pool(stack: Stack, tmp_path: Path) -> None:
    inputs = [tritonclient.grpc.InferInput("x", [1, 1], "INT64")]
    inputs[0].set_data_from_numpy(np.array([[3]], np.int64))
    body, headers = GOOD[0]
    path = "/v2/models/m/infer"
    with grpc.insecure_channel(stack.grpc) as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        request = service_pb2.ModelInferRequest(model_name="m", inputs=[inputs[0]._get_tensor()])
        request.raw_input_contents.append(inputs[0]._get_content())

        def named() -> list[str | None]:
            """Return what REST, the first gRPC call and one of a kind that was seen say; and /v1."""
            found: list[str | None] = [stack.http.post(path, content=body, headers=headers).headers.get(FORM)]
            for _ in range(2):
                _, call = infer.with_call(request)
                found.append(dict(call.trailing_metadata()).get(FORM))
                assert "x-request-id" in dict(call.trailing_metadata())
            reply = stack.http.post("/v1/models/m:predict", json={"instances": [[1], [2]]})
            assert reply.status_code == 200, reply.text
            return [*found, reply.headers.get(FORM)]

        assert named() == [None] * 4
        choose(stack, "m", choices.raising(tmp_path / "form.onnx"))
        is_served_by(stack, "by-hand")
        assert named() == ["v-1; version=1; pool=cpu"] * 4


def test_a_form_that_hangs_is_undone_and_its_requests_are_answered(tmp_path: Path) -> None:
    with running_stack(tmp_path, settings=NO_CHECKS | {"worker_run_s_max": RUN_S_MAX}) as stack:
        stack.push("m", choices.plain(tmp_path / "plain.onnx"))
        choose(stack, "m", choices.looping(tmp_path / "form.onnx", 1 << 60))
        is_served_by(stack, "by-hand")
        with load_on(stack):
            body, headers = SOME_BAD[-1]
            reply = stack.http.post("/v2/models/m/infer", content=body, headers=headers)
            assert reply.status_code == 200, reply.text
            assert values(reply.content, reply.headers) == [BAD]
            assert "took too long" in undone(stack)


def test_a_form_that_turns_slow_is_undone(stack: Stack, tmp_path: Path) -> None:
    choose(stack, "m", choices.looping(tmp_path / "form.onnx", 5000))
    is_served_by(stack, "by-hand")
    with load_on(stack, SOME_BAD[-1:] * 5, callers=2):
        assert "times as long as those of the baseline" in undone(stack)


def test_a_form_that_ends_processes_is_undone(stack: Stack, tmp_path: Path) -> None:
    choose(stack, "m", choices.crashing(tmp_path / "form.onnx"))
    body, headers = SOME_BAD[-1]
    for _ in range(2):
        is_served_by(stack, "by-hand")
        stack.http.post("/v2/models/m/infer", content=body, headers=headers)
    assert "processes ended" in undone(stack)
    reply = stack.http.post("/v2/models/m/infer", content=body, headers=headers)
    assert values(reply.content, reply.headers) == [BAD]


def test_a_worker_that_is_killed_serves_the_winner_again(stack: Stack, tmp_path: Path) -> None:
    choose(stack, "m", choices.raising(tmp_path / "form.onnx"))
    is_served_by(stack, "by-hand")
    worker = stack.pids()["cpu-0"]
    with load_on(stack):
        os.kill(worker, signal.SIGKILL)
        stack.wait_for_line("cpu-0 was ended by SIGKILL: restarting it")
        wait_until(lambda: stack.pids().get("cpu-0", worker) != worker)
        is_served_by(stack, "by-hand")


def test_a_damaged_form_is_undone_at_the_next_start(stack: Stack, tmp_path: Path) -> None:
    choose(stack, "m", choices.raising(tmp_path / "form.onnx"))
    is_served_by(stack, "by-hand")
    [path] = stack.home.glob("repository/models/m/1/compiled/race-*/v-1/model.onnx")
    path.write_bytes(path.read_bytes()[:-3] + b"\0\0\0")
    os.kill(stack.pids()["cpu-0"], signal.SIGKILL)
    assert "damaged" in undone(stack)


def test_a_version_that_is_deleted_takes_everything_of_its_races_with_it(stack: Stack, tmp_path: Path) -> None:
    choose(stack, "m", choices.raising(tmp_path / "form.onnx"))
    is_served_by(stack, "by-hand")
    assert stack.http.delete("/admin/v1/models/m").status_code == 204
    wait_until(lambda: not list((stack.home / "repository" / "races").glob("m@*.json")))
    wait_until(lambda: not (stack.home / "repository" / "models" / "m").exists())


def test_two_workers_follow_one_verdict(tmp_path: Path) -> None:
    with running_stack(tmp_path, pools="cpu=2") as stack:
        stack.push("m", choices.plain(tmp_path / "plain.onnx"))
        with load_on(stack):
            choose(stack, "m", choices.raising(tmp_path / "form.onnx"))
            is_served_by(stack, "by-hand", 2)
        with load_on(stack, SOME_BAD):
            wait_until(lambda: race(stack)["undone"])
            is_served_by(stack, None, 2)
