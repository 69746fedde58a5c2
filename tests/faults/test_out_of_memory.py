"""A worker whose memory runs out: batches are halved until they fit, and no caller gets an error."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np

from tests.kit import models, v2
from tests.kit.stack import running_stack, sigstopped
from tests.kit.wait import wait_until

COLUMNS = 1 << 21  # 8 MiB for each row
ROOM_BYTES = 100 << 20
PATH = "/v2/models/wide/infer"


def test_a_batch_that_finds_no_memory_is_halved_and_later_ones_are_smaller(tmp_path: Path) -> None:
    path = models.wide(tmp_path / "wide.onnx", COLUMNS)
    with running_stack(tmp_path, models={"wide": path}) as stack:
        worker = stack.pids()["cpu-0"]
        taken = int(Path(f"/proc/{worker}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(worker, resource.RLIMIT_AS, (taken + ROOM_BYTES, taken + ROOM_BYTES))

        whole = np.arange(64, dtype=np.float32).reshape(64, 1)
        body, headers = v2.request({"x": whole}, parameters=v2.PATIENT)
        reply = stack.http.post(PATH, content=body, headers=headers)
        assert reply.status_code == 200, reply.text
        np.testing.assert_array_equal(v2.outputs(reply.content, reply.headers)["y"], whole * COLUMNS)

        # of many callers, too
        with sigstopped(worker):
            bodies = [v2.request({"x": whole[4 * at : 4 * at + 4]}, parameters=v2.PATIENT) for at in range(16)]
            sent = [stack.send(PATH, *each) for each in bodies]
            wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= 16)
        for at, connection in enumerate(sent):
            got = connection.getresponse()
            outputs = v2.outputs(got.read(), dict(got.getheaders()))
            assert got.status == 200
            np.testing.assert_array_equal(outputs["y"], whole[4 * at : 4 * at + 4] * COLUMNS)
            connection.close()

        page = stack.metrics()
        halved = page.value("millstream_runs_out_of_memory_total", model="wide")
        assert halved >= 1
        assert stack.pids()["cpu-0"] == worker, "no process died of it"
        print(f"17 requests of 128 rows answered, {halved:.0f} runs halved")
