"""What cannot run without a container engine is checked by the tools that can: schema, linters, and a live
Prometheus.
"""

import http.server
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

from millstream.services.errors import Code
from millstream.services.metrics.catalogue import CATALOGUE, Kind
from millstream.services.metrics.page import MetricsPage
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.process.memory_share import worker_budget
from millstream.services.settings import SECRET_FILES, Settings
from millstream.services.supervisor.pool_specs import parse_pools
from millstream.services.version import VERSION
from tests.kit.metrics_reference import QUERIES
from tests.kit.role_environment import locked, make_environment
from tests.kit.tools import program

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
CACHES = shutil.ignore_patterns("__pycache__")
DOCKERFILE = DEPLOY / "Dockerfile"
TARGETS = ["gateway", "worker-cpu", "worker-gpu", "serving"]
#: an image with its exact version and what that was: a tag can be moved, a digest cannot
PINNED = r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
RULES = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/millstream.json").read_text())
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
RULE_EXPRESSIONS = [
    (rule.get("record") or rule["alert"], rule["expr"]) for group in RULES["groups"] for rule in group["rules"]
]
SAMPLES = {
    name
    for metric in CATALOGUE
    for name in (
        [metric.name + suffix for suffix in ("_bucket", "_sum", "_count")]
        if metric.kind is Kind.HISTOGRAM
        else [metric.name]
    )
}


def content(*command: str | Path) -> None:
    """Run a checker that has to be content; its complaints are the message."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# Images


def read_stages() -> dict[str, list[list[str]]]:
    """Instructions of each stage, as words, after those of the stage that it continues."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [shlex.split(line) if line.startswith("LABEL") else line.split() for line in text.splitlines() if line]
    stages: dict[str, list[list[str]]] = {}
    instructions: list[list[str]] = []  # the arguments before the first stage belong to none
    for line in lines:
        if line[0] == "FROM":
            instructions = [*stages.get(line[1], []), line]
            stages[line[3]] = instructions
        else:
            instructions.append(line)
    return stages


STAGES = read_stages()


def labels_of(target: str) -> dict[str, str]:
    words = [word for line in STAGES[target] if line[0] == "LABEL" for word in line[1:]]
    return dict(word.split("=", 1) for word in words)


def lock_of(target: str) -> str:
    """The lock file whose packages an image holds."""
    source = next(line[1].removeprefix("--from=") for line in STAGES[target] if line[2:] == ["/opt/venv", "/opt/venv"])
    copied = [line[1] for line in STAGES[source] if line[0] == "COPY" and line[1].startswith("deploy/locks/")]
    assert len(copied) == 1
    return Path(copied[0]).stem


def test_dockerfile_is_clean():
    content(BIN / "hadolint", "--failure-threshold", "style", DOCKERFILE)


def test_there_is_a_target_for_each_part():
    assert [name for name, lines in STAGES.items() if any(line[0] == "ENTRYPOINT" for line in lines)] == TARGETS


def test_base_images_are_pinned_by_digest():
    bases = [line[1] for lines in STAGES.values() for line in lines if line[0] == "FROM" and line[1] not in STAGES]
    assert bases
    assert all(re.fullmatch(PINNED, base) for base in bases)


@pytest.mark.parametrize("target", TARGETS)
def test_image_runs_as_its_own_user_and_has_a_health_check(target):
    lines = STAGES[target]
    assert [line[1] for line in lines if line[0] == "USER"] == ["10001:10001"]
    assert [line[0] for line in lines].count("HEALTHCHECK") == 1


@pytest.mark.parametrize("target", TARGETS)
def test_packages_of_an_image_are_those_of_its_lock(target):
    install = " ".join(next(line for line in STAGES[f"{target}-packages"] if "install" in line and "-r" in line))
    assert "--require-hashes --only-binary :all:" in install
    assert "--no-cache-dir" in install
    assert lock_of(target) == target


@pytest.mark.parametrize("target", ["worker-cpu", "worker-gpu"])
def test_image_of_a_worker_has_nothing_of_a_gateways(target):
    assert locked(lock_of(target)).isdisjoint({"fastapi", "grpcio", "tokenizers", "uvicorn", "onnx"})


@pytest.mark.parametrize("target", TARGETS)
def test_image_says_what_it_is(target):
    labels = {name: value for name, value in labels_of(target).items() if name.startswith("org.opencontainers.image.")}
    title, description, *rest = [name.removeprefix("org.opencontainers.image.") for name in labels]
    assert [title, description, *rest] == ["title", "description", "vendor", "licenses", "version", "revision"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.version"] == "$VERSION"
    assert f"\nARG VERSION={VERSION}\n" in DOCKERFILE.read_text()


@pytest.mark.parametrize("stage", STAGES)
def test_what_an_image_copies_is_let_through(stage):
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for line in STAGES[stage]:
        if line[0] == "COPY" and not line[1].startswith("--from"):
            assert (ROOT / line[1]).exists()
            assert any(line[1] == folder or line[1].startswith(f"{folder}/") for folder in allowed)


@pytest.mark.parametrize(
    ("target", "package"),
    [
        ("gateway", "millstream.gateway"),
        ("gateway", "millstream.services.controller"),
        ("serving", "millstream.gateway"),
        ("serving", "millstream.services.supervisor"),
        ("serving", "millstream.services.cli.commands"),
        ("serving", "millstream.workers"),
        ("worker-cpu", "millstream.workers"),
        ("worker-gpu", "millstream.workers"),
    ],
)
def test_an_image_holds_all_that_its_program_imports(tmp_path, target, package):
    for line in STAGES[target]:
        if line[0] == "COPY" and line[2].startswith("/opt/millstream/"):
            source, copy = ROOT / line[1], tmp_path / line[2].removeprefix("/opt/millstream/")
            if source.is_dir():
                shutil.copytree(source, copy, ignore=CACHES)
            else:
                copy.parent.mkdir(exist_ok=True)
                shutil.copy(source, copy)
    code = (
        "import importlib, pkgutil, sys\n"
        f"import {package}\n"
        f"for module in pkgutil.walk_packages({package}.__path__, '{package}.'): importlib.import_module(module.name)\n"
        f"print(sys.modules['{package}'].__file__)\n"
    )
    # The packages of its lock file and what it copies: neither this checkout nor other packages lend what it lacks.
    python = make_environment(tmp_path / "venv", locked(lock_of(target)))
    done = subprocess.run(
        [python, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(tmp_path))


# Compose


def test_compose_file_follows_the_schema():
    content(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml")


def test_compose_services_hang_together():
    services = COMPOSE["services"]
    assert set(services) == {"redis", "gateway", "controller", "worker-cpu", "worker-gpu", "prometheus", "grafana"}
    for name, service in services.items():
        assert service["restart"] == "unless-stopped"
        assert set(service.get("depends_on", {})) <= set(services)
        assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"}
        if "build" in service:
            assert ROOT / service["build"]["dockerfile"] == DOCKERFILE
            assert service["build"]["target"] in TARGETS
        else:
            assert re.fullmatch(PINNED, service["image"])
            assert "healthcheck" in service
        for port in service.get("ports", []):
            assert name == "gateway" or port.startswith("127.0.0.1:")
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / source).is_dir()
    assert services["gateway"]["ipc"] == "shareable"
    assert services["worker-cpu"]["ipc"] == services["worker-gpu"]["ipc"] == "service:gateway"
    assert services["worker-gpu"]["profiles"] == ["gpu"]
    assert services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


def millstream_environments():
    for name, service in COMPOSE["services"].items():
        environment = service.get("environment", {})
        yield name, {key: str(value) for key, value in environment.items() if key.startswith("MILLSTREAM_")}
    for target in TARGETS:
        words = [word for line in STAGES[target] if line[0] == "ENV" for word in line[1:]]
        pairs = [word.split("=", 1) for word in words if word.startswith("MILLSTREAM_")]
        yield target, dict(pairs)


@pytest.mark.parametrize(("place", "environment"), list(millstream_environments()))
def test_settings_of_containers_are_settings(place, environment, monkeypatch, tmp_path):
    (tmp_path / "secret").write_text("given")
    for key, value in environment.items():
        if key in SECRET_FILES:
            assert place in COMPOSE["services"]
            monkeypatch.setenv(key, str(tmp_path / "secret"))
        else:
            assert key.removeprefix("MILLSTREAM_").lower() in Settings.model_fields
            default = re.fullmatch(r"\$\{\w+:-(.*)\}", value)
            monkeypatch.setenv(key, default[1] if default else value)
    Settings()


WORKERS = {"worker-cpu": ("cpu", "cpu"), "worker-gpu": ("gpu", "cuda:0")}


def of_compose(service: str) -> Settings:
    """The settings that the processes of a service read, without those that compose fills in."""
    environment = COMPOSE["services"][service]["environment"]
    plain = {key: value for key, value in environment.items() if key not in SECRET_FILES and "$" not in str(value)}
    return Settings.model_validate({key.removeprefix("MILLSTREAM_").lower(): value for key, value in plain.items()})


@pytest.mark.parametrize("name", WORKERS)
def test_workers_of_compose_have_the_pools_and_memory_that_their_options_say(name):
    service, (pool, device) = COMPOSE["services"][name], WORKERS[name]
    assert service["command"] == ["--pool", pool]
    content(sys.executable, "-m", "millstream.workers", *service["command"], "--help")
    settings = of_compose(name)
    assert settings.worker_device == device
    assert parse_pools(f"{pool}=1,device={settings.worker_device}").keys() == {pool}
    limit = int(service["deploy"]["resources"]["limits"]["memory"].removesuffix("G")) << 30
    assert limit // 2 < worker_budget(settings.worker_memory, pool, 1) < limit, "tensors need memory, too"


@pytest.mark.parametrize("name", ["gateway", *WORKERS])
def test_services_of_compose_may_drain_before_they_are_killed(name):
    grace_s = int(COMPOSE["services"][name]["stop_grace_period"].removesuffix("s"))
    assert grace_s > of_compose(name).drain_s


def test_every_process_of_compose_has_a_health_check_at_a_port_that_it_serves_and_prometheus_scrapes():
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    scraped = {
        host: discovery["port"]
        for job in prometheus["scrape_configs"]
        for discovery in job.get("dns_sd_configs", [])
        for host in discovery["names"]
    }
    ports = {"gateway": of_compose("gateway").http_port, "controller": of_compose("controller").controller_metrics_port}
    ports |= {name: of_compose(name).worker_metrics_port for name in WORKERS}
    assert scraped == ports
    for name, port in ports.items():
        service = COMPOSE["services"][name]
        if "healthcheck" in service:
            check = " ".join(service["healthcheck"]["test"])
        else:
            lines = STAGES[service["build"]["target"]]
            check = " ".join(" ".join(line) for line in lines if line[0] == "HEALTHCHECK")
        assert f"http://127.0.0.1:{port}/" in check


def test_the_controller_of_compose_shares_redis_and_repository_with_the_others():
    services = COMPOSE["services"]
    entry = services["controller"]["entrypoint"]
    assert entry[:2] == ["python", "-m"]
    assert importlib.util.find_spec(entry[2]) is not None
    for name in ("controller", *WORKERS):
        assert services[name]["volumes"] == services["gateway"]["volumes"]
        for variable in ("MILLSTREAM_REDIS_URL", "MILLSTREAM_HOME"):
            assert services[name]["environment"][variable] == services["gateway"]["environment"][variable]


def test_secrets_of_compose_are_files_that_settings_name():
    gateway = COMPOSE["services"]["gateway"]
    assert gateway["secrets"] == list(COMPOSE["secrets"]) == ["admin_key"]
    assert gateway["environment"]["MILLSTREAM_ADMIN_KEY_FILE"] == "/run/secrets/admin_key"
    assert COMPOSE["secrets"]["admin_key"] == {"environment": "MILLSTREAM_ADMIN_KEY"}
    assert not any("MILLSTREAM_ADMIN_KEY" in service.get("environment", {}) for service in COMPOSE["services"].values())


def test_shared_memory_of_the_gateway_holds_its_segments():
    size = int(COMPOSE["services"]["gateway"]["shm_size"].removesuffix("m")) << 20
    assert size >= Settings.model_fields["shm_bytes_max"].default


def test_redis_forgets_rather_than_writes():
    command = COMPOSE["services"]["redis"]["command"]
    assert command[command.index("--save") + 1] == ""
    assert command[command.index("--appendonly") + 1] == "no"


# Prometheus and Grafana


@pytest.mark.needs("promtool")
def test_prometheus_configuration_and_rules():
    content(program("promtool"), "check", "config", DEPLOY / "prometheus/prometheus.yml")
    content(program("promtool"), "check", "rules", DEPLOY / "prometheus/rules.yml")
    content(program("promtool"), "test", "rules", DEPLOY / "prometheus/rules_test.yml")


def test_committed_dashboard_is_what_the_generator_builds(tmp_path):
    content(sys.executable, DEPLOY / "grafana/build.py", tmp_path / "built.json")
    assert (tmp_path / "built.json").read_text() == (DEPLOY / "grafana/dashboards/millstream.json").read_text()


def test_dashboard_asks_the_provisioned_source():
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/millstream.yml").read_text())["providers"][0]
    asked = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if panel["type"] != "row"}
    assert asked == {source["uid"]}
    folder = provider["options"]["path"]
    assert f"./deploy/grafana/dashboards:{folder}:ro" in COMPOSE["services"]["grafana"]["volumes"]


@pytest.mark.parametrize(("title", "expression"), [*EXPRESSIONS, *RULE_EXPRESSIONS, *QUERIES])
def test_metrics_that_are_asked_for_exist(title, expression):
    names = re.findall(r"\bmillstream_\w+", re.sub(r'"[^"]*"', '""', expression))
    assert set(names) <= SAMPLES
    labels = set(re.findall(r"(\w+)\s*=~?\s*\"", expression))
    for clause in re.findall(r"by \(([^)]*)\)", expression):
        labels |= set(re.split(r",\s*", clause))
    known = {label for metric in CATALOGUE if metric.name in expression for label in metric.labels}
    assert labels <= known | {"le", "job", "instance"} or not names


@pytest.mark.parametrize(("title", "expression"), [*EXPRESSIONS, *RULE_EXPRESSIONS, *QUERIES])
def test_outcomes_that_are_asked_for_are_codes(title, expression):
    for outcomes in re.findall(r'outcome=~"([^"]*)"', expression):
        assert set(outcomes.split("|")) <= set(Code)


def test_every_metric_is_on_the_dashboard():
    asked = " ".join(expression for _, expression in EXPRESSIONS)
    assert [metric.name for metric in CATALOGUE if metric.name not in asked] == []


class Target:
    """A real scrape target: every metric of the catalogue, counting one more at each scrape."""

    def __init__(self) -> None:
        self.tally = MetricsRegistry(None, "gateway")
        self.scraped = threading.Condition()
        target = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body, content_type = target.scrape(self.headers.get("Accept"))
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                with target.scraped:
                    target.scraped.notify_all()

            def log_message(self, *_: object) -> None:
                """Scrapes are no news."""

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)

    def scrape(self, accept):
        for metric in CATALOGUE:
            labels = ["internal" if label == "outcome" else f"a-{label}" for label in metric.labels]
            if metric.kind is Kind.COUNTER:
                self.tally.counter(metric, *labels).add()
            elif metric.kind is Kind.HISTOGRAM:
                self.tally.histogram(metric, *labels).observe(0.02)
            else:
                self.tally.gauge(metric, *labels).set(1)
        return MetricsPage(self.tally).render(accept)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class LivePrometheus:
    """Debian's Prometheus with our rules, on a port of its own choice."""

    def __init__(self, folder: Path, target: Target) -> None:
        self.target = target
        configuration = {
            "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"},
            "rule_files": [str(DEPLOY / "prometheus/rules.yml")],
            "scrape_configs": [
                {
                    "job_name": "millstream-gateway",
                    "static_configs": [{"targets": [f"127.0.0.1:{target.server.server_port}"]}],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        self.process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self.url = ""

    def __enter__(self):
        assert self.process.stderr is not None
        listening = re.compile(r'msg="Listening on" address=(\S+)')
        ready = False
        for line in self.process.stderr:
            self.log.append(line)
            if found := listening.search(line):
                self.url = f"http://{found[1]}"
            ready = ready or "ready to receive web requests" in line
            if ready and self.url:
                break
        assert self.url, "".join(self.log)
        self.reader = threading.Thread(target=self.log.extend, args=(self.process.stderr,))
        self.reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()
        self.reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def get(self, path: str, **parameters: str):
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as reply:
            document = json.load(reply)
        assert document["status"] == "success"
        return document["data"]

    def next_scrape(self):
        with self.target.scraped:
            assert self.target.scraped.wait(timeout=60), "".join(self.log)

    def query(self, expression):
        """Ask after each scrape until there is an answer; the test's time limit ends a wait that is in vain."""
        while not (result := self.get("query", query=expression)["result"]):
            self.next_scrape()
        return result


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    with Target() as target, LivePrometheus(tmp_path_factory.mktemp("prometheus"), target) as prometheus:
        # Two scrapes make the first rate.
        prometheus.query("rate(millstream_requests_total[1m]) > 0")
        yield prometheus


def as_grafana_sends_it(expression):
    return expression.replace("$__rate_interval", "1m").replace("$model", ".*")


@pytest.mark.needs("prometheus")
@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_dashboard_expression_shows_something(live, title, expression):
    result = live.query(as_grafana_sends_it(expression))
    assert all(float(series["value"][1]) >= 0 for series in result), "not a number"


@pytest.mark.needs("prometheus")
@pytest.mark.parametrize(("question", "expression"), QUERIES)
def test_queries_of_the_metrics_page_are_read(live, question, expression):
    assert live.get("query", query=expression)["resultType"] == "vector"


@pytest.mark.needs("prometheus")
def test_dashboard_variable_offers_the_models(live):
    query = DASHBOARD["templating"]["list"][0]["query"]
    asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
    assert asked is not None
    metric, label = asked.groups()
    assert live.get(f"label/{label}/values", **{"match[]": metric}) == ["a-model"]


@pytest.mark.needs("prometheus")
def test_rules_are_healthy_in_a_live_server(live):
    while True:
        rules = [rule for group in live.get("rules")["groups"] for rule in group["rules"]]
        if all(rule["health"] != "unknown" for rule in rules):
            break
        live.next_scrape()
    assert {rule["name"] for rule in rules} == {name for name, _ in RULE_EXPRESSIONS}
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    for name, _ in RULE_EXPRESSIONS:
        if ":" in name:
            assert live.query(name)
