"""A model whose runs take long, however many rows they have: the warm-up measures one row, requests share runs all the
same.
"""

from __future__ import annotations

import numpy as np

from millstream.services.model.manifest import ModelConfig
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import Settings
from tests.kit import v2
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.versions import publish_simulated
from tests.kit.wait import wait_until
from tests.kit.worker_process import running_worker

RUN_S = 0.8
POOL = "simulated"
PATH = "/v2/models/long/infer"


def test_requests_share_runs_that_were_measured_with_one_row_alone(tmp_path):
    with running_stack(tmp_path) as stack:
        publish_simulated(
            FolderRepository(Settings(home=stack.home).repository_dir),
            "long",
            {"run_s": RUN_S},
            config=ModelConfig(pools=(POOL,), timeout_ms_default=300_000),
        )
        with running_worker(stack, POOL):
            wait_until(lambda: stack.http.get("/v2/models/long/ready").status_code == 200)
            assert 1 <= wave(stack, 10) <= 6
            assert 1 <= wave(stack, 20) <= 6


def wave(stack: Stack, requests: int) -> int:
    """So many requests of one row at once; how many runs they took."""
    before = stack.metrics().value("millstream_batch_rows_count", model="long")
    rows = [np.full((1, 4), number, np.float32) for number in range(requests)]
    with sigstopped(stack.pids()["gateway-0"]):  # it finds all of them at once, however long it takes to send them
        sent = [stack.send(PATH, *v2.request({"x": row})) for row in rows]
    for row, connection in zip(rows, sent, strict=True):
        reply = connection.getresponse()
        body, headers = reply.read(), dict(reply.getheaders())
        connection.close()
        assert reply.status == 200, body
        np.testing.assert_array_equal(v2.outputs(body, headers)["y"], row)
    return int(stack.metrics().value("millstream_batch_rows_count", model="long") - before)
