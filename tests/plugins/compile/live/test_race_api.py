"""The admin API and the commands of races on a running stack: ask, show, cancel, undo, samples, clear errors."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit import models
from tests.kit.command_line import Millstream
from tests.kit.races import raise_priorities
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

RACE = "/admin/v1/models/mlp/versions/1/race"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with running_stack(folder, pools="cpu=1,sim=1,backend=simulated") as stack:
        stack.push("mlp", models.mlp(folder / "mlp.onnx"), config='{"pools": ["cpu"]}')
        yield stack


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def no_array() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("input", b"no array")
    return file.getvalue()


def race(stack: Stack) -> dict[str, Any]:
    raise_priorities(stack)
    reply = stack.http.get(RACE)
    assert reply.status_code == 200, reply.text
    document: dict[str, Any] = reply.json()
    return document


def ended(stack: Stack) -> dict[str, Any]:
    return wait_until(
        lambda: document if (document := race(stack))["state"] not in {"queued", "running"} else None, 300
    )


def test_there_is_no_race_before_one_was_asked_for(stack: Stack) -> None:
    reply = stack.http.get(RACE)
    assert reply.status_code == 404
    assert "millstream race mlp" in reply.text
    assert stack.http.post(f"{RACE}/undo").status_code == 404
    assert stack.http.delete(RACE).status_code == 404


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"second": 5}, "second"),
        ({"pool": "gpu"}, "gpu"),
        ({"gate": {"cosine_min": 2}}, "cosine_min"),
        ({"targets": ["no-such-compiler"]}, "no-such-compiler"),
        ({"gate": {"metric": "cosine >"}}, "gate.metric"),
    ],
)
def test_wrong_options_are_refused_by_name(stack: Stack, document: dict[str, Any], says: str) -> None:
    reply = stack.http.post(RACE, json=document)
    assert reply.status_code == 400, reply.text
    assert says in reply.text
    assert stack.http.get(RACE).status_code == 404


def test_an_unknown_model_or_version_is_not_found(stack: Stack) -> None:
    assert stack.http.post("/admin/v1/models/mlp/versions/9/race").status_code == 404
    assert stack.http.post("/admin/v1/models/nope/versions/1/race").status_code == 404


def test_a_race_is_asked_for_once_cancelled_and_asked_for_again(stack: Stack) -> None:
    worker = stack.pids()["cpu-0"]
    first = stack.http.post(RACE, json={"accept_random_samples": True})
    assert first.status_code == 202, first.text
    assert first.json()["kind"] == "onnxruntime.cpu"
    again = stack.http.post(RACE, json={"accept_random_samples": True}).json()
    assert again["requested_at"] == first.json()["requested_at"]
    if race(stack)["state"] in {"queued", "running"}:
        other = stack.http.post(RACE, json={"targets": ["openvino"]})
        assert other.status_code == 409, other.text
        assert "cancel it" in other.text
        assert stack.http.delete(RACE).json()["state"] == "cancelled"
        assert stack.http.delete(RACE).json()["state"] == "cancelled", "twice is as good as once"
    new = stack.http.post(RACE, json={"targets": ["onnxruntime"]}).json()
    assert new["state"] == "queued"
    assert new["past"]
    ended(stack)
    assert stack.pids()["cpu-0"] == worker
    undone = stack.http.post(f"{RACE}/undo")
    assert undone.status_code in {200, 409}
    assert race(stack)["serving"] is False


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not an .npz file"),
        (b"PK\x03\x04 broken", "not an .npz file"),
        (npz(other=np.zeros((2, 64), np.float32)), "other"),
        (npz(input=np.zeros((2, 63), np.float32)), "[2, 63]"),
        (npz(input=np.zeros((0, 64), np.float32)), "there are no rows"),
        (npz(input=np.array([{}] * 64, object)), "not an .npz file"),
        (npz(**{"input/input": np.zeros((2, 64)), "output/output": np.zeros((3, 10))}), "same number of rows"),
        (npz(input=np.full((2, 64), "a")), "has the datatype"),
        (npz(input=np.full((2, 64), 1e39)), "that float32 cannot hold, the largest 1e+39"),
        (no_array(), "not an .npz file"),
    ],
)
def test_wrong_samples_are_refused_with_what_to_change(stack: Stack, content: bytes, says: str) -> None:
    reply = stack.http.put(f"{RACE}/samples", content=content)
    assert reply.status_code == 400, reply.text
    assert says in reply.json()["error"]
    assert not list((stack.home / "repository" / "models" / "mlp" / "1").glob("race/*"))


def test_samples_are_kept_for_the_servers_user_alone(stack: Stack) -> None:
    reply = stack.http.put(f"{RACE}/samples", content=npz(input=np.zeros((5, 64))))
    assert reply.json() == {"arrays": {"input/input": [5, 64]}}, reply.text
    [path] = (stack.home / "repository" / "models" / "mlp" / "1" / "race").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert np.load(path)["input/input"].dtype == np.float32


def test_a_version_that_no_worker_has_ready_is_refused_with_what_to_do(stack: Stack, tmp_path: Path) -> None:
    config = json.dumps({"pools": ["sim"]})
    content = models.mlp(tmp_path / "mlp.onnx").read_bytes()
    where = "/admin/v1/models/nowhere/versions"
    assert stack.http.post(where, params={"config": config}, content=content).status_code in {201, 400}
    reply = stack.http.post(f"{where}/1/race")
    assert reply.status_code in {404, 409}, reply.text


def test_the_commands_show_a_race(stack: Stack) -> None:
    command = Millstream(stack.home)
    shown = json.loads(command.ok("race", "mlp", "--no-wait", "--json"))
    assert {"baseline", "winner", "ratio", "rows"} <= shown.keys()
    ended(stack)
    text = command.ok("race", "mlp", "--show")
    assert "mlp version 1" in text
    found = json.loads(command.ok("race", "mlp", "--show", "--json"))
    assert found["state"] == race(stack)["state"]
    if found["rows"]:
        line = command.ok("race", "mlp", "--reproduce", "1")
        assert line.startswith("millstream race mlp --version 1 --pool cpu --targets ")
        absent = {row["target"] for row in found["rows"] if row["verdict"] == "unavailable"}
        assert {"cuda", "tensorrt"} <= absent
        assert set(text.rpartition("not here: ")[2].partition(" (")[0].split(", ")) == absent


def test_the_gate_is_set_by_the_command_and_repeated_with_a_row(stack: Stack) -> None:
    command = Millstream(stack.home)
    gate = ["--cosine-min", "0.9", "--agreement-min", "0.5"]
    asked = json.loads(command.ok("race", "mlp", "--targets", "onnxruntime", *gate, "--no-wait", "--json"))
    expected = {"cosine_min": 0.9, "agreement_min": 0.5}
    assert asked["options"]["gate"] == expected
    assert ended(stack)["state"] == "decided"
    words = shlex.split(command.ok("race", "mlp", "--reproduce", "1"))
    assert words[words.index("--agreement-min") + 1] == gate[-1]
    again = json.loads(command.ok(*words[1:], "--no-wait", "--json"))
    assert again["options"]["gate"] == expected
    [target] = again["options"]["targets"]
    found = ended(stack)
    assert found["state"] == "decided"
    assert target in {row["candidate"] for row in found["rows"]}


def is_done(stack: Stack, end: Future[Any]) -> bool:
    raise_priorities(stack)
    return end.done()


@contextmanager
def waiting(stack: Stack, *options: str) -> Iterator[Future[subprocess.CompletedProcess[str]]]:
    """Run `millstream race mlp` during the block, and yield its end."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(Millstream(stack.home).run, "race", "mlp", *options)


def test_waiting_for_a_race_ends_with_its_verdict(stack: Stack) -> None:
    with waiting(stack, "--targets", "onnxruntime", "--json") as end:
        wait_until(lambda: is_done(stack, end), 300, "the command returns")
    assert end.result().returncode == 0, end.result().stderr
    document = json.loads(end.result().stdout)
    assert (document["state"], bool(document["rows"])) == ("decided", True)


def test_waiting_for_a_race_without_a_verdict_fails(stack: Stack) -> None:
    with waiting(stack, "--accept-random-samples") as end:
        wait_until(
            lambda: stack.http.get(RACE).json().get("options", {}).get("accept_random_samples"),
            what="it was asked for",
        )
        assert stack.http.delete(RACE).json()["state"] == "cancelled"
    assert end.result().returncode == 1
    assert "no verdict was reached: it was cancelled" in end.result().stderr


def test_a_race_is_shown_on_a_terminal_while_it_runs(stack: Stack) -> None:
    arguments = ["race", "mlp", "--targets", "onnxruntime"]
    with ThreadPoolExecutor(1) as thread:
        end = thread.submit(Millstream(stack.home).in_terminal, arguments, 120)
        wait_until(lambda: is_done(stack, end), 300, "the command returns")
    code, text = end.result()
    assert code == 0, text
    assert "mlp version 1: " in text, "the title of the table that is drawn again and again"
    assert "ROW" in text, "the report at its end"
