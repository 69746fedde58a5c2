"""Runs the pods of the overlay `s3` with a folder in the place of the bucket: read-only for every pod."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.kit.containers.host import Running
from tests.kit.containers.pods import HEADERS, URL, Pods
from tests.kit.stack import CALL_S_MAX, ROOT
from tests.kit.wait import wait_until

pytestmark = pytest.mark.needs("containers")

DIGITS = ROOT / "examples/digits"
NAMES = ("millstream-redis", "millstream-gateway", "millstream-worker-cpu")


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    pods = Pods(tmp_path, "s3")
    try:
        version = pods.host.volume("millstream-models", "0:0") / "digits" / "1"
        version.mkdir(parents=True)
        shutil.copy(DIGITS / "digits.onnx", version / "model.onnx")
        for name in NAMES:
            pods.start(name)
        yield pods
    except BaseException:
        print(pods.output())
        raise
    finally:
        pods.host.close()


def test_a_model_of_a_folder_that_no_pod_can_write_to_is_loaded_and_answers(pods: Pods) -> None:
    folder = pods.host.volume("millstream-models", "0:0")
    files = sorted(folder.rglob("*"))
    assert "Read-only file system" in written(pods.host.running["millstream-gateway"])
    assert "Read-only file system" in written(pods.host.running["millstream-worker-cpu"])
    request = json.loads((DIGITS / "request.json").read_text())
    with (
        pods.host.network(),
        httpx2.Client(base_url=URL, headers=HEADERS, timeout=CALL_S_MAX, trust_env=False) as client,
    ):
        listed = client.post("/v2/repository/index", json={}).json()
        assert [model["name"] for model in listed] == ["digits"]
        loaded = client.post("/v2/repository/models/digits/load", json={})
        assert loaded.status_code == 200, loaded.text
        answer = client.post("/v2/models/digits/infer", json=request)
        assert answer.status_code == 200, answer.text
        # A worker that starts later reads the same files.
        pods.host.running.pop("millstream-worker-cpu").stop()
        pods.start("millstream-worker-cpu")

        def again() -> httpx2.Response | None:
            reply = client.post("/v2/models/digits/infer", json=request)
            assert reply.status_code == 200 or "retry-after" in reply.headers, reply.text
            return reply if reply.status_code == 200 else None

        assert wait_until(again, what="the new worker answers").json()["outputs"] == answer.json()["outputs"]
    assert sorted(folder.rglob("*")) == files


def written(running: Running) -> str:
    """Return what the shell says of an attempt to write to the folder."""
    return running.run("sh", "-c", "echo >/models/file").stderr
