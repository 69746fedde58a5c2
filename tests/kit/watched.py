"""A real loaded stack that a real Prometheus scrapes, and docs/dashboards.md: `python -m tests.kit.watched` writes it.

Counters that appear with their first event have no rate before the second one, so each event comes in two rounds with
a scrape between them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.grafana.table import render, rows
from tests.kit import models, v2
from tests.kit.command_line import Millstream
from tests.kit.load import constant_load
from tests.kit.prometheus import LivePrometheus
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.wait import wait_until

PAGE = Path(__file__).parents[2] / "docs/dashboards.md"
ROUNDS = 2
CALLS = 200  # answers of the load in a round
LARGE = 1 << 14  # numbers of a row
ORDERS = "millstream_controller_orders_total"
WINDOW = "10m"  # longer than the run: every event is in it

INTRO = """\
# Dashboards

Every panel of `deploy/grafana`, with what it showed of a real run: one gateway, two workers and a controller under
load, with errors, loads and unloads. `python -m tests.kit.watched` makes the run and writes this page;
`python -m deploy.grafana.table http://PROMETHEUS:9090` prints the same table of your own installation.

"no data": the run has no such event. tests/integration/test_dashboards_live.py names these panels and says why.

"""


@contextmanager
def watched_stack(folder: Path) -> Iterator[tuple[Stack, LivePrometheus]]:
    """Yield a stack that was loaded, and the Prometheus that scraped it meanwhile."""
    (folder / "prometheus").mkdir()
    with running_stack(folder, pools="cpu=2", controller=True) as stack:
        targets = {"millstream-gateway": [f"127.0.0.1:{stack.port}"]}
        with LivePrometheus(folder / "prometheus", targets, interval="1s") as prometheus:
            prometheus.query("millstream_worker_info")
            stack.push("mlp", models.mlp(folder / "mlp.onnx"))
            stack.push("lookup", models.lookup(folder / "lookup.onnx"))
            stack.push("large", models.scale(folder / "large.onnx", columns=LARGE))
            stack.push("cold", models.mlp(folder / "cold.onnx"))
            for _ in range(ROUNDS):
                _cause(stack)
                _scraped(stack, prometheus)
            yield stack, prometheus


def _cause(stack: Stack) -> None:
    """Cause each event once: answers, refusals, failures, a load on demand, an unload, a call over gRPC."""
    body = v2.request({"input": np.ones((2, 64), np.float32)})
    with constant_load(stack.port, "/v2/models/mlp/infer", [body], callers=4) as load:
        load.more(CALLS)
    outside = v2.request({"index": np.array([[99]], np.int64)})
    assert stack.http.post("/v2/models/lookup/infer", content=outside[0], headers=outside[1]).status_code == 500
    assert stack.http.post("/v2/models/mlp/infer", content=b"{").status_code == 400
    late = v2.request({"input": np.ones((1, 64), np.float32)}, parameters={"timeout": 1})
    assert stack.http.post("/v2/models/mlp/infer", content=late[0], headers=late[1]).status_code == 504
    large = v2.request({"x": np.ones((1, LARGE), np.float32)})  # travels through shared memory
    assert stack.http.post("/v2/models/large/infer", content=large[0], headers=large[1]).status_code == 200
    with grpc.insecure_channel(stack.grpc) as channel:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    _load_on_demand(stack, body)


def _load_on_demand(stack: Stack, body: tuple[bytes, dict[str, str]]) -> None:
    """Call a model, have the controller unload it because it idles, and call it again."""

    def answers() -> bool:
        reply = stack.http.post("/v2/models/cold/infer", content=body[0], headers=body[1])
        assert reply.status_code == 200 or float(reply.headers["retry-after"]) > 0, reply.text
        return reply.status_code == 200

    wait_until(answers, what="the model answers")
    command = Millstream(stack.home)
    command.ok("configure", "cold", "--idle-s", "1", "--instances-min", "0")
    version = "/admin/v1/models/cold/versions/1"
    wait_until(lambda: stack.http.get(version).json()["state"] == "standby", what="the idle model is unloaded")
    command.ok("configure", "cold", "--idle-s", "0")
    wait_until(answers, what="it is loaded and answers")
    ordered = stack.metrics().value(ORDERS)
    command.ok("configure", "cold", "--instances-min", "2")
    wait_until(lambda: stack.metrics().value(ORDERS) > ordered, what="the controller orders the second instance")


def _scraped(stack: Stack, prometheus: LivePrometheus) -> None:
    """Wait until Prometheus has what the stack counted."""
    assert_quiet(stack)
    counted = ("millstream_requests_total", "millstream_batch_rows_count", "millstream_evictions_total")
    for name in (*counted, "millstream_eviction_age_seconds_count", "millstream_model_load_duration_seconds_count"):
        prometheus.query(f"sum({name}) >= {stack.metrics().value(name)} > 0")
    for name in (ORDERS, "millstream_controller_order_outcomes_total"):
        prometheus.query(f"rate({name}[{WINDOW}])")  # the controller counts at the end of its round


def write_page() -> None:
    """Write docs/dashboards.md from a run."""
    with tempfile.TemporaryDirectory() as folder, watched_stack(Path(folder)) as (_, prometheus):
        PAGE.write_text(INTRO + render(rows(prometheus.ask, WINDOW)))


if __name__ == "__main__":
    write_page()
