"""The manifests for KServe, without a cluster: held against KServe's and Kubernetes' own classes, and against what is
served.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
import typer
import yaml

from millstream.services.cli.app import full_app
from millstream.services.cli.commands.serve import discover
from millstream.services.environment import child_environment
from millstream.services.errors import Failure
from millstream.services.settings import settings_class
from tests.kit import models
from tests.kit.application import Application
from tests.kit.stack import CALL_S_MAX, ROOT
from tests.kit.tools import CLIENTS
from tests.kit.wait import wait_until

FOLDER = ROOT / "deploy/kserve"
RUNTIME = yaml.safe_load((FOLDER / "serving-runtime.yaml").read_text())
SERVICE = yaml.safe_load((FOLDER / "inference-service.yaml").read_text())
CONTAINER = RUNTIME["spec"]["containers"][0]


def problems(kind: str, document: Any) -> list[str]:
    done = subprocess.run(
        [CLIENTS / "bin" / "python", "-P", ROOT / "tests/integration/programs/kserve_manifest.py", kind],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


@pytest.mark.needs("kserve")
def test_manifests_follow_the_schemas() -> None:
    assert problems("V1alpha1ClusterServingRuntime", RUNTIME) == []
    assert problems("V1alpha1ServingRuntime", {**RUNTIME, "kind": "ServingRuntime"}) == []
    assert problems("V1beta1InferenceService", SERVICE) == []
    wrong = {**RUNTIME, "spec": {**RUNTIME["spec"], "protocols": ["v2"], "containers": "none"}}
    assert sorted(problems("V1alpha1ClusterServingRuntime", wrong)) == [
        ".spec.containers: no list",
        ".spec.protocols: unknown",
    ]


def test_the_runtime_says_what_kserve_looks_for() -> None:
    assert CONTAINER["name"] == "kserve-container"
    assert RUNTIME["spec"]["protocolVersions"] == ["v1", "v2", "grpc-v2"]
    names = {one["name"] for one in RUNTIME["spec"]["supportedModelFormats"]}
    assert SERVICE["spec"]["predictor"]["model"]["modelFormat"]["name"] in names
    assert SERVICE["spec"]["predictor"]["model"]["runtime"] == RUNTIME["metadata"]["name"]
    volumes = {one["name"] for one in RUNTIME["spec"]["volumes"]}
    assert {one["name"] for one in CONTAINER["volumeMounts"]} == volumes


def test_its_arguments_are_those_of_the_command() -> None:
    name, *arguments = CONTAINER["args"]
    command: Any = typer.main.get_command(full_app()).commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, arguments)
    assert context.params["http_port"] == CONTAINER["ports"][0]["containerPort"] == 8080
    assert context.params["grpc_port"] == 9000
    assert context.params["folder"] == Path("/mnt/models")
    assert context.params["name"] == "{{.Name}}"
    for variable in CONTAINER["env"]:
        assert variable["name"].removeprefix("MILLSTREAM_").lower() in settings_class().model_fields


@pytest.mark.anyio
async def test_probes_and_metrics_are_where_they_say(tmp_path: Path) -> None:
    async with Application(tmp_path).client() as client:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            where = CONTAINER[probe]["httpGet"]
            assert where["port"] == 8080
            assert (await client.get(where["path"])).status_code == 200
        annotations = RUNTIME["spec"]["annotations"]
        assert annotations["prometheus.kserve.io/port"] == "8080"
        assert (await client.get(annotations["prometheus.kserve.io/path"])).status_code == 200


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_what_the_command_serves(tmp_path: Path) -> None:
    """A container's start, to its answer: on every address, with an admin API that is closed."""
    folder = tmp_path / "model"
    folder.mkdir()
    models.scale(folder / "any.onnx")
    environment = {"MILLSTREAM_HOME": str(tmp_path / "home"), "MILLSTREAM_POOLS": "cpu=1,threads=1"}
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "millstream.services.cli",
            "serve",
            folder,
            "--name",
            "m",
            "--http-port",
            "0",
            "--grpc-port",
            "-1",
        ],
        env=child_environment(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if line.startswith("ready http://"))
        port = int(ready.rpartition(":")[2])
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=CALL_S_MAX, trust_env=False) as client:
            wait_until(lambda: client.get("/ping").status_code == 200, what="it is ready")
            assert client.post("/invocations", json=[[1, 2]]).json() == {"predictions": [[2.0, 4.0]]}
            assert client.get("/v1/models/m").json()["ready"] is True
            assert client.get("/admin/v1/models").status_code == 401
    finally:
        process.terminate()
        process.communicate(timeout=CALL_S_MAX)
    assert process.returncode == 0


def test_what_sagemaker_left_in_the_models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    assert discover(folder, "m") == (None, None)
    folder.mkdir()
    assert discover(folder, "m") == (None, None)
    (folder / "digits").mkdir()
    assert discover(folder, "m") == (None, str(folder))
    (folder / "any.onnx").write_bytes(b"\0")
    assert discover(folder, "m") == (f"m={folder / 'any.onnx'}", None)
    (folder / "other.onnx").write_bytes(b"")
    with pytest.raises(Failure, match=r"model: there are 2 ONNX files \(any.onnx, other.onnx\)"):
        discover(folder, "m")
    for version in ("2", "10"):
        (tmp_path / "versions" / version).mkdir(parents=True)
        (tmp_path / "versions" / version / "model.onnx").write_bytes(b"\0")
    assert discover(tmp_path / "versions", "m") == (f"m={tmp_path}/versions/10/model.onnx", None)
