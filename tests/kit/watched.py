"""Real stacks that a real Prometheus scrapes, and docs/dashboards.md: `python -m tests.kit.watched` writes it.

One is under load, with traces, errors, loads, unloads and a race. The other has TLS, API keys and a simulated device.
Counters that appear with their first event have no rate before the second one, so each event comes in two rounds with
a scrape between them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.grafana.table import Row, render, rows
from tests.kit import choices, models, v2
from tests.kit.certificates import Authority
from tests.kit.choices import BAD, choose
from tests.kit.command_line import Millstream
from tests.kit.load import constant_load
from tests.kit.otlp import http_collector
from tests.kit.prometheus import LivePrometheus
from tests.kit.races import raise_priorities
from tests.kit.stack import Stack, assert_quiet, running_stack, sigstopped
from tests.kit.wait import wait_until

PAGE = Path(__file__).parents[2] / "docs/dashboards.md"
ROUNDS = 2
CALLS = 200  # answers of the load in a round
LARGE = 1 << 14  # numbers of a row
ORDERS = "millstream_controller_orders_total"
WINDOW = "10m"  # longer than the run: every event is in it

RACE = "/admin/v1/models/mlp/versions/1/race"
RACE_S = 200  # its processes take only the time that others leave
UNANSWERED = "millstream_readiness_probes_unanswered_total"
ADMIN_KEY = "an-admin-key-of-a-test"

INTRO = """\
# Dashboards

Every panel of `deploy/grafana`, with what it showed of a real run: one gateway, two workers and a controller under
load, with traces, errors, loads, unloads, a race and a frozen worker; and beside them an installation with TLS, API
keys and a simulated accelerator. `python -m tests.kit.watched` makes the run and writes this page;
`python -m deploy.grafana.table http://PROMETHEUS:9090` prints the same table of your own installation.

"""


@contextmanager
def watched_stack(folder: Path) -> Iterator[tuple[Stack, LivePrometheus]]:
    """Yield a stack that was loaded, and the Prometheus that scraped it and the other one meanwhile."""
    (folder / "prometheus").mkdir()
    with ExitStack() as exits:
        collector = exits.enter_context(http_collector())
        secured = exits.enter_context(_secured_stack(folder))
        stack = exits.enter_context(
            running_stack(
                folder,
                pools="cpu=2",
                controller=True,
                settings={"tracing": True, "live_check_one_in": 0},
                environment={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url},
            )
        )
        targets = {"millstream-gateway": [f"127.0.0.1:{stack.port}"]}
        prometheus = exits.enter_context(
            LivePrometheus(folder / "prometheus", targets, interval="1s", scrapes=[secured])
        )
        prometheus.query("millstream_worker_info")
        stack.push("mlp", models.mlp(folder / "mlp.onnx"))
        stack.push("lookup", models.failing(folder / "lookup.onnx"))
        stack.push("large", models.scale(folder / "large.onnx", columns=LARGE))
        stack.push("cold", models.mlp(folder / "cold.onnx"))
        stack.push("echo", choices.plain(folder / "plain.onnx"))
        for _ in range(ROUNDS):
            _cause(stack)
            _scraped(stack, prometheus)
        _race(stack)
        _take_a_form_back(stack, choices.raising(folder / "raising.onnx"))
        _leave_probes_unanswered(stack)
        yield stack, prometheus


@contextmanager
def _secured_stack(folder: Path) -> Iterator[dict[str, Any]]:
    """Start an installation with TLS, API keys and a simulated accelerator; yield how Prometheus scrapes it."""
    home = folder / "secured"
    home.mkdir()
    authority = Authority(home)
    certificate, key = authority.issue()
    settings = {
        "admin_key": ADMIN_KEY,
        "tls_cert_file": certificate,
        "tls_key_file": key,
        "ca_file": authority.certificate,
    }
    with running_stack(
        home, pools="gpu=1,backend=simulated,device=cuda:0,device_memory=1GiB", settings=settings
    ) as stack:
        reply = stack.http.post(
            "/admin/v1/keys", json={"name": "prometheus", "scopes": ["metrics"], "expires_in_s": 90 * 86_400}
        )
        assert reply.status_code == 201, reply.text
        (home / "scraper.key").write_text(reply.json()["key"])
        yield {
            "job_name": "secured",
            "scheme": "https",
            "tls_config": {"ca_file": str(authority.certificate), "server_name": "localhost"},
            "authorization": {"credentials_file": str(home / "scraper.key")},
            "static_configs": [{"targets": [f"127.0.0.1:{stack.port}"]}],
        }


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


def _race(stack: Stack) -> None:
    """Have a worker race the MLP, until the verdict."""
    options = {"seconds": RACE_S, "targets": ["onnxruntime"], "accept_random_samples": True}
    reply = stack.http.post(RACE, json=options)
    assert reply.status_code == 202, reply.text

    def over() -> bool:
        raise_priorities(stack)
        return stack.http.get(RACE).json()["state"] not in {"waiting", "queued", "running"}

    wait_until(over, 2 * RACE_S, "the race is over")


def _take_a_form_back(stack: Stack, form: Path) -> None:
    """Serve a model by a form that fails where the model does not, until a worker takes it back."""
    choose(stack, "echo", form)
    wait_until(lambda: stack.metrics().value("millstream_variants_swapped_total", model="echo"), what="it serves")
    body, headers = v2.request({"x": np.array([[BAD]], np.int64)}, parameters=v2.PATIENT)

    def undone() -> bool:
        assert stack.http.post("/v2/models/echo/infer", content=body, headers=headers).status_code == 200
        return stack.metrics().value("millstream_variants_undone_total", model="echo") > 0

    wait_until(undone, what="it is taken back")


def _leave_probes_unanswered(stack: Stack) -> None:
    """Freeze the workers until readiness probes were left unanswered twice, with the counter scraped in between."""
    pids = [pid for name, pid in stack.pids().items() if name.startswith("cpu-")]
    with sigstopped(*pids):
        for count in range(1, ROUNDS + 1):
            wait_until(lambda count=count: stack.metrics().value(UNANSWERED, pool="cpu") >= count)  # type: ignore[misc]
    wait_until(lambda: stack.metrics().value("millstream_gateway_ready", process="gateway-0") == 1)


def found_rows(prometheus: LivePrometheus) -> list[Row]:
    """Wait until every panel has data, and return their rows; after WAIT_S without data for some.

    After a scrape that failed, gauges have no value until the next one: each panel keeps what it showed last.
    """
    found: dict[tuple[str, str], Row] = {}

    def complete() -> bool:
        for row in rows(prometheus.ask, WINDOW):
            if row.lines or (row.page.name, row.chart.title) not in found:
                found[row.page.name, row.chart.title] = row
        return all(row.lines for row in found.values())

    with suppress(AssertionError):  # the caller tells which have no data
        wait_until(complete)
    return list(found.values())


def write_page() -> None:
    """Write docs/dashboards.md from a run."""
    with tempfile.TemporaryDirectory() as folder, watched_stack(Path(folder)) as (_, prometheus):
        PAGE.write_text(INTRO + render(iter(found_rows(prometheus))))


if __name__ == "__main__":
    write_page()
