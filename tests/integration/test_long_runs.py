"""A model whose runs take long, however many rows they have: the warm-up measures one row, requests share runs all the
same.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from millstream.services.installation import installation_name
from millstream.services.model.manifest import Manifest, ModelConfig, SourceFile
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import Settings, child_environment
from millstream.services.supervisor.plan import metrics_dir_of
from tests.kit import v2
from tests.kit.stack import Stack, running_stack
from tests.kit.versions import SIGNATURE
from tests.kit.wait import wait_until

RUN_S = 0.8
POOL = "echoes"
PATH = "/v2/models/long/infer"


def publish(stack: Stack) -> None:
    """A version of the echo backend, which sleeps."""
    repository = FolderRepository(Settings(home=stack.home).repository_dir)
    content = json.dumps({"sleep_s": RUN_S}).encode()
    digest = hashlib.sha256(content).hexdigest()
    spec = SIGNATURE.inputs[0]
    manifest = Manifest(
        model="long",
        version=1,
        created=1_700_000_000.0,
        digest=digest,
        served="source/echo.json",
        files=(SourceFile(path="source/echo.json", size_bytes=len(content), sha256=digest),),
        signature=SIGNATURE.model_copy(update={"outputs": (spec.model_copy(update={"name": "y"}),)}),
        config=ModelConfig(pool=POOL, timeout_ms_default=300_000),
        opset=17,
        ir_version=8,
    )
    with repository.open_staging() as staging:
        (staging.path / "source").mkdir()
        (staging.path / "source" / "echo.json").write_bytes(content)
        repository.publish(staging, manifest, activate=True)


@contextmanager
def echo_worker(stack: Stack) -> Iterator[None]:
    settings = Settings(home=stack.home)
    environment = {
        "MILLSTREAM_HOME": str(stack.home),
        "MILLSTREAM_REDIS_URL": f"unix://{stack.socket}",
        "MILLSTREAM_INSTALLATION_NAME": installation_name(settings),
        "MILLSTREAM_METRICS_DIR": str(metrics_dir_of(settings)),
    }
    command = [sys.executable, "-P", "-m", "millstream.workers", "--pool", POOL, "--index", "0", "--backend", "echo"]
    process = subprocess.Popen(command, env=child_environment(environment), stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_requests_share_runs_that_were_measured_with_one_row_alone(tmp_path):
    with running_stack(tmp_path) as stack:
        publish(stack)
        with echo_worker(stack):
            wait_until(lambda: stack.http.get("/v2/models/long/ready").status_code == 200, 60)
            assert 1 <= wave(stack, 10) <= 6
            assert 1 <= wave(stack, 20) <= 6


def wave(stack: Stack, requests: int) -> int:
    """So many requests of one row at once; how many runs they took."""
    before = stack.metrics().value("millstream_batch_rows_count", model="long")
    rows = [np.full((1, 4), number, np.float32) for number in range(requests)]
    sent = [stack.send(PATH, *v2.request({"x": row})) for row in rows]
    for row, connection in zip(rows, sent, strict=True):
        reply = connection.getresponse()
        body, headers = reply.read(), dict(reply.getheaders())
        connection.close()
        assert reply.status == 200, body
        np.testing.assert_array_equal(v2.outputs(body, headers)["y"], row)
    return int(stack.metrics().value("millstream_batch_rows_count", model="long") - before)
