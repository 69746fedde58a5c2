"""Unknown keys of configurations, parameters and variables: the refusal has the valid ones, the nearest first."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.services.environment import child_environment
from tests.kit.stack import ROOT, Stack

ONNX = (ROOT / "examples" / "digits" / "digits.onnx").read_bytes()
CONFIGURATIONS = [
    ({"row_max": 2}, "config: there is no field 'row_max': did you mean 'rows_max'? valid: rows_max, "),
    ({"zzz": 2}, "config: there is no field 'zzz': valid: batching, rows_max, pools, "),
    ({"queue": {"timeout_ms": 1}}, "config.queue: there is no field 'timeout_ms': did you mean 'timeout_ms_default'"),
    ({"queue_by_priority": {"1": {"max": 1}}}, "config.queue_by_priority.1: there is no field 'max': valid: timeout_"),
    ({"warmup": [{"name": "w", "row": 1}]}, "config.warmup.0: there is no field 'row': did you mean 'rows'"),
    (
        {"warmup": [{"name": "w", "inputs": {"x": {"data_type": "FP32", "shape": [1]}}}]},
        "config.warmup.0.inputs.x: there is no field 'data_type': did you mean 'datatype'",
    ),
]


@pytest.mark.parametrize(("config", "says"), CONFIGURATIONS)
def test_a_field_of_the_configuration(stack: Stack, config: object, says: str) -> None:
    path = "/admin/v1/models/unknown-keys/versions"
    reply = stack.http.post(path, params={"config": json.dumps(config)}, content=ONNX)
    assert reply.status_code == 400
    assert reply.json()["error"].startswith(says)
    form = stack.http.post(path, files={"model": ONNX, "config": (None, json.dumps(config))})
    assert form.json() == reply.json()


@pytest.mark.parametrize(
    ("parameter", "says"),
    [
        ("actvate", "did you mean 'activate'? valid: activate, config, wait, allow_pickle, allow_code, input"),
        ("x", "valid: config, wait, activate, allow_pickle, allow_code, input"),
    ],
)
def test_a_parameter_of_an_upload(stack: Stack, parameter: str, says: str) -> None:
    for method, path in (("POST", "versions"), ("PUT", "versions/1")):
        reply = stack.http.request(
            method, f"/admin/v1/models/unknown-keys/{path}", params={parameter: "false"}, content=ONNX
        )
        assert reply.status_code == 400
        assert reply.json()["error"] == f"there is no query parameter '{parameter}': {says}"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"max_batch": 8}, "there is no field 'max_batch': did you mean 'max_batch_size'? valid: max_batch_size, name"),
        ({"input": [{"data_type": "TYPE_FP33"}]}, "there is no value 'TYPE_FP33': did you mean 'TYPE_FP32'"),
    ],
)
def test_a_field_of_a_triton_configuration(stack: Stack, config: object, says: str) -> None:
    parameters = {"config": json.dumps(config), "file:1/model.onnx": base64.b64encode(ONNX).decode()}
    reply = stack.http.post("/v2/repository/models/unknown-keys/load", json={"parameters": parameters})
    assert reply.status_code == 400
    assert says in reply.json()["error"]


@pytest.mark.parametrize(
    ("path", "status"),
    [("/admin/v1/models/team/model/versions", 404), ("/admin/v1/models/team%2Fmodel/versions/1", 400)],
)
def test_a_slash_in_a_name(stack: Stack, path: str, status: int) -> None:
    reply = stack.http.request("PUT" if path.endswith("1") else "POST", path, content=ONNX)
    assert reply.status_code == status
    assert "a model name has no slash: use 1 to 128 letters, digits, '.', '_' or '-'" in reply.json()["error"]


@pytest.mark.parametrize("name", ["a b", ".hidden", "ends.", "größe", "a" * 129])
def test_another_bad_character_in_a_name(stack: Stack, name: str) -> None:
    reply = stack.http.post(f"/admin/v1/models/{name}/versions", content=ONNX)
    assert reply.status_code == 400
    assert "is not allowed: use 1 to 128 letters, digits" in reply.json()["error"]


def test_an_unknown_variable(tmp_path: Path) -> None:
    """`up` warns and goes on: it ends because of its preload."""
    settings = {"MILLSTREAM_HOME": str(tmp_path), "MILLSTREAM_HTP_PORT": "1", "MILLSTREAM_SERVICE_HOST": "10.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-m", "millstream.services.cli", "up", "--preload", "x"],
        env=child_environment(settings),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "MILLSTREAM_HTP_PORT is no setting and has no effect; did you mean 'MILLSTREAM_HTTP_PORT'" in done.stderr
    assert "SERVICE_HOST" not in done.stderr
    assert "write NAME=PATH" in done.stderr
