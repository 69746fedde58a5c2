"""A client that is generated from the committed OpenAPI document uploads a model and sends it requests."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.kit.openapi import PATH
from tests.kit.stack import running_stack
from tests.kit.tools import CLIENTS

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"
PROGRAM = Path(__file__).parent / "programs" / "generated_client.py"
RUN_S_MAX = 300

# Types of bodies that the generator does not know are bytes for it.
CONFIG = """
content_type_overrides:
  application/jsonlines: application/octet-stream
  text/csv: application/octet-stream
  application/x-npy: application/octet-stream
  application/vnd.amazon.eventstream: application/octet-stream
"""


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S_MAX, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done  # type: ignore[no-any-return]


@pytest.mark.needs("clients")
def test_a_generated_client_uploads_and_infers(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    generated = run(
        *(CLIENTS / "bin" / "openapi-python-client", "generate", "--path", PATH, "--config", tmp_path / "config.yaml"),
        *("--output-path", tmp_path / "millstream_api", "--meta", "none"),
    )
    assert "WARNING" not in generated.stdout + generated.stderr, generated.stdout + generated.stderr
    with running_stack(tmp_path) as stack:
        done = run(
            *(CLIENTS / "bin" / "python", PROGRAM, stack.url, DIGITS / "digits.onnx"),
            input=(DIGITS / "request.json").read_text(),
            env={"PYTHONPATH": str(tmp_path), "NO_PROXY": "*"},
        )
        found = json.loads(done.stdout)
    assert found["state"] == "ready"
    assert found["outputs"][0] == {"name": "label", "datatype": "INT64", "shape": [1], "data": [2]}
    assert found["same"]
    assert found["error"].startswith("Request for unknown model: 'absent'")
    assert found["models"] == ["made"]
    assert found["inputs"] == ["pixels"]
