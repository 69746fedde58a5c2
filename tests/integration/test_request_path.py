"""The files that a request passes, from its socket to its reply, are those of the walks in docs/architecture.md.

They are traced in a running gateway and its worker: files whose functions are called during each of several windows of
a few requests. What runs on timers is not in all windows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.kit import models
from tests.kit.called_files import sitecustomize
from tests.kit.stack import ROOT, Stack, running_stack
from tests.kit.wait import wait_until

FOLDERS = {"gateway", "services", "workers", "plugins", "client"}
TRACER = Path(sitecustomize.__file__).parent
WINDOWS, REQUESTS = 20, 2
ROUNDS = 5  # on a busy machine a batch may take another way, or a loop run in each window: then all is traced again
REST_FILES_MAX, GRPC_FILES_MAX = 42, 56
X = np.ones((1, 2), np.float32)


class Traced(NamedTuple):
    stack: Stack
    folder: Path  # of the recordings

    def files(self, call: Callable[[], object]) -> set[str]:
        """Return the files that all windows have in common, of gateway and worker together."""
        pids = self.stack.pids()
        found: set[str] = set()
        for pid in (pids["gateway-0"], pids["cpu-0"]):
            windows = [self._window(pid, call) for _ in range(WINDOWS)]
            found |= set.intersection(*windows)
        return found

    def _window(self, pid: int, call: Callable[[], object]) -> set[str]:
        before = len(list(self.folder.glob(f"{pid}.*")))
        call()  # wakes the loops that sleep while nothing is in flight
        os.kill(pid, sitecustomize.START)
        for _ in range(REQUESTS):
            call()
        os.kill(pid, sitecustomize.STOP)
        made = self.folder / f"{pid}.{before + 1}"
        wait_until(made.exists, what="the recording")
        paths = [Path(line).resolve() for line in made.read_text().splitlines() if line.startswith("/")]
        inside = [path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT)]
        return {str(path) for path in inside if path.parts[0] in FOLDERS}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    recordings = folder / "recordings"
    recordings.mkdir()
    environment = {"PYTHONPATH": str(TRACER), "PYTHON_CALLED_FILES": str(recordings)}
    served = {"m": models.scale(folder / "m.onnx")}
    with running_stack(folder, models=served, environment=environment) as stack:
        yield Traced(stack, recordings)


def walk(title: str) -> dict[int, set[str]]:
    """Return the files of each step of a walk. A step may refer to steps of the REST walk."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split(f"### {title}\n", 1)[1].split("\nOther ", 1)[0]
    steps: dict[int, set[str]] = {}
    for number, text in re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", section, re.MULTILINE | re.DOTALL):
        steps[int(number)] = set(re.findall(r"`([a-z0-9_/]+\.py)`", text))
        referred = re.match(r"Steps (\d+) to (\d+) of the REST walk", text)
        if referred is not None:
            rest = walk("A REST infer request")
            steps[int(number)] |= set().union(*(rest[step] for step in range(int(referred[1]), int(referred[2]) + 1)))
    return steps


def assert_walk(traced: Traced, title: str, call: Callable[[], object], files_max: int) -> None:
    written = set().union(*walk(title).values())
    for _ in range(WINDOWS):
        call()  # until head and envelope are known
    for _ in range(ROUNDS):
        passed = traced.files(call)
        if passed == written:
            break
    assert sorted(passed - written) == [], "files that the walk lacks"
    assert sorted(written - passed) == [], "files that no request passes"
    assert len(passed) <= files_max


def test_a_rest_request_passes_the_files_of_its_walk(traced: Traced) -> None:
    tensor = {"name": "x", "shape": X.shape, "datatype": "FP32", "data": X.ravel().tolist()}
    body = json.dumps({"inputs": [tensor]})
    with closing(HTTPConnection("127.0.0.1", traced.stack.port)) as client:

        def call() -> None:
            client.request("POST", "/v2/models/m/infer", body)
            reply = client.getresponse()
            assert reply.status == 200, reply.read()
            assert json.loads(reply.read())["outputs"][0]["data"] == [2, 2]

        assert_walk(traced, "A REST infer request", call, REST_FILES_MAX)


def test_a_grpc_call_passes_the_files_of_its_walk(traced: Traced) -> None:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[X.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=X.shape)
    with grpc.insecure_channel(traced.stack.grpc) as channel:
        infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        assert_walk(traced, "A gRPC call", lambda: infer(request), GRPC_FILES_MAX)
