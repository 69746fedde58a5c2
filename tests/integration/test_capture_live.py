"""Samples of live traffic, captured under concurrent load: asked for, bounded, whole rows, gone afterwards."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.kit import models, v2
from tests.kit.command_line import Millstream
from tests.kit.load import constant_load
from tests.kit.races import raise_priorities
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

INFER = "/v2/models/mlp/infer"
RACE = "/admin/v1/models/mlp/versions/1/race"
CALLERS = 12
ROWS = 64  # that are captured
ENDED = {"decided", "failed", "cancelled"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with running_stack(folder, pools="cpu=2", models={"mlp": models.mlp(folder / "mlp.onnx")}) as stack:
        yield stack


def row(number: int) -> np.ndarray:
    """Return the row that request `number` repeats: no other request has it, nor a part of it."""
    return np.random.default_rng(number).standard_normal(64).astype(np.float32)


def bodies() -> list[tuple[bytes, dict[str, str]]]:
    """Return requests of one row to five, each with a row of its own."""
    return [v2.request({"input": np.tile(row(at), (at % 5 + 1, 1))}, binary=True) for at in range(4 * CALLERS)]


def captured(stack: Stack) -> list[Path]:
    return list((stack.home / "repository").rglob("captured.npz"))


def test_rows_of_concurrent_requests_are_captured_whole_used_by_a_race_and_deleted(stack: Stack) -> None:
    command = Millstream(stack.home)
    sent = {row(at).tobytes() for at in range(4 * CALLERS)}
    with constant_load(stack.port, INFER, bodies(), callers=CALLERS, pause_s=0) as load:
        load.more(200)
        assert not captured(stack), "nobody asked for samples"
        command.ok("configure", "mlp", "--capture-samples", str(ROWS))
        load.until(lambda: captured(stack))
        [path] = captured(stack)
        assert path.stat().st_mode & 0o777 == 0o600
        found = np.load(io.BytesIO(path.read_bytes()))["input/input"]
        assert 1 <= len(found) <= ROWS
        assert {one.tobytes() for one in found} <= sent, "rows are copies of what was sent, not of reused memory"
        assert len({one.tobytes() for one in found}) > 1, "they come from several requests"

        targets = "onnxruntime,onnxruntime-int8-dynamic"
        command.ok("race", "mlp", "--targets", targets, "--race-seconds", "60", "--no-wait", "--json")

        def over() -> bool:
            raise_priorities(stack)
            return stack.http.get(RACE).json()["state"] in ENDED

        wait_until(over, 240, "the race is over")
        report = json.loads(command.ok("race", "mlp", "--show", "--json"))
        assert report["state"] == "decided", report
        assert report["report"]["samples"] == "captured"
        tried = {one["target"] for one in report["rows"] if one["verdict"] not in {"skipped", "unavailable"}}
        assert tried == set(targets.split(",")), "lossy targets take part: the samples are real"
        wait_until(lambda: not captured(stack), what="the samples are deleted")
        load.more(200)
    assert not captured(stack)
    assert {answer.status for answer in load.answers} == {200}


def test_a_race_that_is_cancelled_leaves_no_samples(stack: Stack) -> None:
    command = Millstream(stack.home)
    with constant_load(stack.port, INFER, bodies(), callers=CALLERS) as load:
        command.ok("configure", "mlp", "--capture-samples", "9")
        load.until(lambda: captured(stack))
        asked = stack.http.post(RACE, json={"seconds": 600, "targets": ["onnxruntime-int8-dynamic"]})
        assert asked.status_code in {200, 202}, asked.text
        assert stack.http.delete(RACE).json()["state"] == "cancelled"
        # Its worker may have written them meanwhile, as the race began, and then deletes them.
        for _ in range(2):
            wait_until(lambda: not captured(stack), what="the samples are deleted")
            load.more(50)


def test_samples_are_deleted_when_the_setting_is_turned_off(stack: Stack) -> None:
    command = Millstream(stack.home)
    with constant_load(stack.port, INFER, bodies(), callers=CALLERS) as load:
        command.ok("configure", "mlp", "--capture-samples", "8")
        load.until(lambda: captured(stack))
        command.ok("configure", "mlp", "--capture-samples", "0")
        wait_until(lambda: not captured(stack), what="they are gone")
        load.more(50)
    assert not captured(stack)
    assert {answer.status for answer in load.answers} == {200}
