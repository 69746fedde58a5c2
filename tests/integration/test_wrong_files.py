"""Files that are no ONNX model, sent to a running product: each refusal says what the file is and what to do."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.services.environment import child_environment
from tests.kit.stack import ROOT, Stack
from tests.kit.wrong_files import WRONG_FILES

#: one for each way through the code
UPLOADED = ("empty", "pickle", "html", "lfs", "torch", "saved-model-tar", "pickle-in-tar", "zip", "gzip", "half")


@pytest.mark.parametrize("name", UPLOADED)
def test_an_upload_is_refused_with_what_to_do(stack: Stack, name: str) -> None:
    content, says = WRONG_FILES[name]
    reply = stack.http.post("/admin/v1/models/wrong-file/versions", content=content)
    assert reply.status_code == 400
    assert says in reply.json()["error"]
    assert stack.http.get("/admin/v1/models/wrong-file").status_code == 404


@pytest.mark.parametrize("name", ["tensorrt", "safetensors", "text"])
def test_a_load_with_files_is_refused_with_what_to_do(stack: Stack, name: str) -> None:
    content, says = WRONG_FILES[name]
    files = {"file:1/model.onnx": base64.b64encode(content).decode()}
    reply = stack.http.post(
        "/v2/repository/models/wrong-file/load", json={"parameters": {"config": json.dumps({}), **files}}
    )
    assert reply.status_code == 400
    assert reply.json()["error"].startswith("failed to load 'wrong-file', version 1: ")
    assert says in reply.json()["error"]


@pytest.mark.parametrize("name", ["pickle", "html", "lfs", "gguf", "half", "empty"])
def test_push_refuses_it_before_it_calls_the_server(tmp_path: Path, name: str) -> None:
    content, says = WRONG_FILES[name]
    file = tmp_path / "model.onnx"
    file.write_bytes(content)
    assert says in pushed("wrong-file", file)


def test_push_says_the_rule_for_names() -> None:
    assert "letters, digits, '.', '_' or '-'" in pushed("team/model", ROOT / "examples" / "digits" / "digits.onnx")


def pushed(*arguments: object) -> str:
    """Return the one error line of a `millstream push` to a server that does not exist."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "millstream.services.cli",
            "push",
            *map(str, arguments),
            "--endpoint",
            "http://127.0.0.1:9",
        ],
        env=child_environment({"NO_COLOR": "1"}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    return done.stderr
