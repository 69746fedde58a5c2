"""Our own OpenAPI page, and what a fuzzer makes of it: no internal error, no status and no form that is not written
there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import models
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
RUN_S_MAX = 600
# What is not offered says so with 501, and a worker that is held up with 503 or 504. Where they may come is documented.
EXPECTED = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "501", "503", "504"]
"""
# Requests that reach a model: names made up at random find none.
PARAMETERS = """
[parameters]
"path.model" = "digits"
"path.version" = "1"
"""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("fuzzed")
    with running_stack(folder, settings={"shm_allow_clients": True, "request_bytes_max": 1 << 20}) as stack:
        stack.push("digits", models.mlp(folder / "m.onnx"))
        yield stack


@pytest.mark.timeout(RUN_S_MAX + 300)
@pytest.mark.parametrize("config", ["", PARAMETERS], ids=["any names", "a model that is there"])
def test_no_internal_error_and_nothing_undocumented(serving: Stack, config: str, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(EXPECTED + config)
    found = subprocess.run(
        [
            *(Path(sys.executable).with_name("schemathesis"), "run", f"{serving.url}/openapi.json"),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "5", "--seed", "1"),
            *("--checks", CHECKS, "--continue-on-failure", "--generation-database", "none", "--warnings", "off"),
            # they would take away what the others are about; tests/integration/test_admin_api.py has them
            *("--exclude-operation-id", "create_key"),  # from the first key on, every call needs one
            *(("--exclude-method", "DELETE") if config else ()),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    wait_until(lambda: serving.http.get("/v2/health/ready").status_code == 200, what="it is ready")
