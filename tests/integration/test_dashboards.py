"""Every expression of dashboards, rules and docs/metrics.md in a live Prometheus, over a page with all metrics."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from millstream.services.metrics.catalogue import CATALOGUE, Kind
from millstream.services.metrics.page import MetricsPage
from millstream.services.metrics.registry import MetricsRegistry
from tests.kit.metrics_reference import QUERIES
from tests.kit.prometheus import LivePrometheus, rules
from tests.kit.wait import wait_until

DASHBOARDS = [
    json.loads(path.read_text()) for path in Path(__file__).parents[2].glob("deploy/grafana/dashboards/*.json")
]
EXPRESSIONS = [
    (f"{board['title']}: {panel['title']}", target["expr"])
    for board in DASHBOARDS
    for panel in board["panels"]
    for target in panel.get("targets", [])
]

#: label -> the value that expressions ask for by name
_ASKED_FOR = {"outcome": "internal", "reason": "lane_full"}

pytestmark = pytest.mark.needs("prometheus")


class Target:
    """A real scrape target: every metric of the catalogue, counting one more at each scrape."""

    def __init__(self) -> None:
        self.registry = MetricsRegistry(None, "gateway")
        target = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, content_type = target.scrape(self.headers.get("Accept"))
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Scrapes are no news."""

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)

    def scrape(self, accept: str | None) -> tuple[bytes, str]:
        for metric in CATALOGUE:
            labels = [_ASKED_FOR.get(label, f"a-{label}") for label in metric.labels]
            if metric.kind is Kind.COUNTER:
                self.registry.counter(metric, *labels).add()
            elif metric.kind is Kind.HISTOGRAM:
                self.registry.histogram(metric, *labels).observe(0.02)
            else:
                # Panels show how far away an instant is.
                ahead = time.time() + 86_400 if metric.name.endswith("_timestamp_seconds") else 1
                self.registry.gauge(metric, *labels).set(ahead)
        return MetricsPage(self.registry).render(accept)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePrometheus]:
    with Target() as target:
        targets = {"millstream-gateway": [f"127.0.0.1:{target.server.server_port}"]}
        with LivePrometheus(tmp_path_factory.mktemp("prometheus"), targets) as prometheus:
            prometheus.query("rate(millstream_requests_total[1m]) > 0")  # two scrapes make the first rate
            yield prometheus


def as_grafana_sends_it(expression: str) -> str:
    return re.sub(r"\$(installation|model|pool)\b", ".*", expression.replace("$__rate_interval", "1m"))


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_dashboard_expression_shows_something(live: LivePrometheus, title: str, expression: str) -> None:
    result = live.query(as_grafana_sends_it(expression))
    assert all(float(series["value"][1]) >= 0 for series in result), "not a number"


@pytest.mark.parametrize(("question", "expression"), QUERIES)
def test_queries_of_the_metrics_page_are_read(live: LivePrometheus, question: str, expression: str) -> None:
    assert live.get("query", query=expression)["resultType"] == "vector"


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board["uid"])
def test_dashboard_variables_offer_label_values(live: LivePrometheus, board: dict[str, Any]) -> None:
    source, *variables = board["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("source", "datasource", "prometheus")
    for variable in variables:
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
        assert asked is not None
        metric, label = asked.groups()
        values = live.get(f"label/{label}/values", **{"match[]": as_grafana_sends_it(metric)})
        assert values == [f"a-{label}"]
    used = set(re.findall(r"\$([a-z]\w*)", json.dumps(board["panels"])))
    assert used == {variable["name"] for variable in variables}
    assert {panel["datasource"]["uid"] for panel in board["panels"] if "datasource" in panel} == {"${source}"}


def test_expressions_are_of_the_chosen_installation(live: LivePrometheus) -> None:
    for title, expression in EXPRESSIONS:
        assert not live.ask(expression.replace("$installation", "another").replace("$__rate_interval", "1m")), title


def test_rules_are_healthy_in_a_live_server(live: LivePrometheus) -> None:
    def evaluated() -> list[dict[str, Any]]:
        found = [rule for group in live.get("rules")["groups"] for rule in group["rules"]]
        return found if all(rule["health"] != "unknown" for rule in found) else []

    found = wait_until(evaluated, what="all rules were evaluated")
    names = [rule.get("record") or rule["alert"] for rule in rules()]
    assert sorted(rule["name"] for rule in found) == sorted(names)
    assert [(rule["name"], rule.get("lastError")) for rule in found if rule["health"] != "ok"] == []
    for name in names:
        if ":" in name:
            assert live.query(name)
