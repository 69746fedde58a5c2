"""A version that is batched wrongly, since its owner forced it: a live batch shows it, and from then on answers are
right.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from millstream.services.wire.records import InstanceRecord
from tests.kit import models, v2
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.wait import wait_until

ABOVE = 2.0**30  # further than any trial of an upload goes
FORCED = json.dumps({"batching": True})
CHECKS = "millstream_batch_checks_total"
OFF = "millstream_batching_off"


def ask_together(stack: Stack, model: str, rows: list[v2.Array]) -> list[v2.Array]:
    """One request for each row, which find the workers asleep: they could share runs."""
    with sigstopped(*(pid for name, pid in stack.pids().items() if name.startswith("cpu-"))):
        sent = [stack.send(f"/v2/models/{model}/infer", *v2.request({"x": row})) for row in rows]
        wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= len(rows))
    outputs = []
    for connection in sent:
        reply = connection.getresponse()
        body, headers = reply.read(), dict(reply.getheaders())
        connection.close()
        assert reply.status == 200, body
        outputs.append(v2.outputs(body, headers)["y"])
    return outputs


def version(stack: Stack, model: str) -> dict[str, Any]:
    document: dict[str, Any] = stack.http.get(f"/admin/v1/models/{model}/versions/1").json()
    return document


def off(document: dict[str, Any]) -> str | None:
    """Why a version is batched no more."""
    return str(document["batching_reason"]) if document["batching_decided"] == "off" else None


def test_a_version_whose_rows_influence_each_other_is_batched_no_more(tmp_path: Path) -> None:
    settings = {"live_check_one_in": 1, "queue_lease_s": 120}
    with running_stack(tmp_path, pools="cpu=2", gateways=2, settings=settings) as stack:
        stack.push("coupled", models.coupled(tmp_path / "coupled.onnx", ABOVE), config=FORCED)
        stack.push("steady", models.scale(tmp_path / "steady.onnx"))
        rows = [np.full((1, 2), ABOVE + 2.0**25 * number, np.float32) for number in range(1, 25)]

        def found() -> str | None:
            ask_together(stack, "coupled", rows)
            return off(version(stack, "coupled"))

        assert "depends on the other rows of its batch" in str(wait_until(found, what="a live batch shows it"))
        for index in range(stack.gateways):
            with stack.gateway(index) as gateway:
                wait_until(partial(knows, gateway))
        wait_until(lambda: merged(stack, "coupled") == [1, 1], what="both workers know")
        before = stack.metrics()
        assert before.value(OFF, model="coupled") == 1
        assert before.value(CHECKS, model="coupled", outcome="differs") >= 1
        for row, output in zip(rows, ask_together(stack, "coupled", rows), strict=True):
            np.testing.assert_array_equal(output, row - row)  # what it gives alone: less the mean, which is the row
        wait_until(lambda: ran(stack, before, "coupled") == (24, 24), what="each request ran alone")

        # whose rows have nothing to do with each other goes on sharing runs
        before = stack.metrics()

        def checked() -> bool:
            """Measured on a busy machine, one row may seem as good as many: runs are shared once that is corrected."""
            for row, output in zip(rows, ask_together(stack, "steady", rows), strict=True):
                np.testing.assert_array_equal(output, 2 * row)
            return stack.metrics().value(CHECKS, model="steady", outcome="agrees") >= 1

        wait_until(checked, what="a shared run of the other version was checked")
        runs, total = ran(stack, before, "steady")
        assert total >= 24
        assert runs < total
        assert off(version(stack, "steady")) is None
        assert stack.metrics().value(OFF, model="steady") == 0

        # an operator may have it tried again
        reply = stack.http.post("/admin/v1/models/coupled/versions/1/activate")
        assert reply.status_code == 200
        wait_until(lambda: off(version(stack, "coupled")) is None)
        wait_until(lambda: stack.metrics().value(OFF, model="coupled") == 0)


def knows(gateway: httpx2.Client) -> bool:
    return off(gateway.get("/admin/v1/models/coupled/versions/1").json()) is not None


def merged(stack: Stack, model: str) -> list[int]:
    """Rows that each worker runs together."""
    keys = stack.redis.scan_iter("*:instances:*")
    instances = [InstanceRecord.model_validate_json(data) for key in keys for data in stack.redis.hvals(key)]
    return [one.rows_efficient for one in instances if one.model == model]


def ran(stack: Stack, before: Any, model: str) -> tuple[int, int]:
    """Runs since then, and their rows."""
    now = stack.metrics()
    names = ("millstream_batch_rows_count", "millstream_batch_rows_sum")
    runs, rows = (int(now.value(name, model=model) - before.value(name, model=model)) for name in names)
    return runs, rows
