"""What cannot run without a container engine is checked by the tools that can: schema, linters, and a live
Prometheus.
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from millstream.services.environment import REVISION
from millstream.services.errors import Code
from millstream.services.metrics.catalogue import CATALOGUE, Kind
from millstream.services.settings import SECRET_FILES, Settings, settings_class
from millstream.services.supervisor.pool_specs import parse_pools
from millstream.services.version import VERSION
from tests.kit.containers import compose
from tests.kit.containers.dockerfile import DOCKERFILE, STAGES, lock_of
from tests.kit.metrics_reference import QUERIES
from tests.kit.prometheus import rules
from tests.kit.role_environment import locked, make_environment
from tests.kit.tools import program

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
CACHES = shutil.ignore_patterns("__pycache__")
TARGETS = ["gateway", "worker-cpu", "worker-gpu", "serving"]
#: an image with its exact version and what that was: a tag can be moved, a digest cannot
PINNED = r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
DASHBOARDS = {path: json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana/dashboards").glob("*.json"))}
PANELS = [panel for board in DASHBOARDS.values() for panel in board["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
RULE_EXPRESSIONS = [(rule.get("record") or rule["alert"], rule["expr"]) for rule in rules()]
SAMPLES = {
    name
    for metric in CATALOGUE
    for name in (
        [metric.name + suffix for suffix in ("_bucket", "_sum", "_count")]
        if metric.kind is Kind.HISTOGRAM
        else [metric.name]
    )
}
#: metrics that a later change brings and that an alert asks for already -> their labels
FORTHCOMING: dict[str, tuple[str, ...]] = {}


def content(*command: str | Path) -> None:
    """Run a checker that has to be content; its complaints are the message."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# Images


def labels_of(target: str) -> dict[str, str]:
    words = [word for line in STAGES[target] if line[0] == "LABEL" for word in line[1:]]
    return dict(word.split("=", 1) for word in words)


def test_dockerfile_is_clean():
    content(BIN / "hadolint", "--failure-threshold", "style", DOCKERFILE)


def test_there_is_a_target_for_each_part():
    assert [name for name, lines in STAGES.items() if any(line[0] == "ENTRYPOINT" for line in lines)] == TARGETS


def test_base_images_are_pinned_by_digest():
    bases = {line[1] for lines in STAGES.values() for line in lines if line[0] == "FROM" and line[1] not in STAGES}
    assert len(bases) == 3
    assert all(re.fullmatch(PINNED, base) for base in bases - {"scratch"})


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
    assert [line[1] for line in STAGES[target] if line[0] == "ENV" and "REVISION" in line[1]] == [
        f"{REVISION}=$REVISION"
    ]
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
        ("gateway", "millstream.plugins.fleet.controller"),
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


def test_the_target_sbom_has_all_that_it_needs(tmp_path):
    """Its command, in a folder with nothing but what its stage copies."""
    for line in STAGES["components"]:
        if line[0] == "COPY":
            for source in line[1:-1]:
                copy = tmp_path / Path(line[-1]).relative_to("/opt/millstream")
                copy = copy / source if line[-1].endswith("/") else copy
                copy.parent.mkdir(parents=True, exist_ok=True)
                (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, copy)
    assert STAGES["components"][-1] == ["RUN", "python", "deploy/supply_chain.py", "sbom"]
    command = (ROOT / ".venv/audit/bin/python", "deploy/supply_chain.py", "sbom", "worker-cpu")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folder = Path(STAGES["sbom"][-1][2]).relative_to("/opt/millstream")
    assert json.loads((tmp_path / folder / "worker-cpu.json").read_text())["bomFormat"] == "CycloneDX"


# Compose


def test_compose_file_follows_the_schema():
    content(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml")


def test_compose_services_hang_together():
    services = COMPOSE["services"]
    started = {"redis", "gateway", "controller", "worker-cpu", "worker-gpu", "prometheus", "alertmanager", "grafana"}
    assert set(services) == started | {"admin-key"}
    for name, service in services.items():
        assert service["restart"] == ("no" if name == "admin-key" else "unless-stopped")
        assert set(service.get("depends_on", {})) <= set(services)
        if "build" in service:
            assert ROOT / service["build"]["dockerfile"] == DOCKERFILE
            assert service["build"]["target"] in TARGETS
            assert service["image"] == f"${{IMAGE_PREFIX:-}}millstream-{service['build']['target']}:{VERSION}"
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


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_of_compose_has_no_rights_and_limits(name):
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["user"].partition(":")[0]) > 0
    limits = service["deploy"]["resources"]["limits"]
    assert limits.keys() == {"cpus", "memory", "pids"}
    # An engine refuses a limit of more CPUs than its machine has, so what is there by default is for two.
    assert float(default_of(limits["cpus"])) <= 2


def default_of(value: str) -> str:
    """What compose puts for a variable that is unset."""
    found = re.fullmatch(r"\$\{\w+:-(.*)\}", value)
    return found[1] if found else value


@pytest.mark.skipif(sys.platform != "linux", reason="there is no compose for it")
@pytest.mark.parametrize("profiles", [(), ("gpu",)])
def test_compose_understands_the_file_without_any_variable(profiles):
    services = compose.resolved(*profiles)["services"]
    assert set(services) == {
        name for name, one in COMPOSE["services"].items() if set(one.get("profiles", [])) <= {*profiles}
    }
    assert services["gateway"]["image"] == f"millstream-gateway:{VERSION}"


@pytest.mark.skipif(sys.platform != "linux", reason="there is no compose for it")
def test_variables_that_the_readme_names_change_what_compose_starts():
    table = (DEPLOY / "README.md").read_text().partition("| variable of compose |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([A-Z]\w+)`", table))
    text = (ROOT / "docker-compose.yml").read_text()
    assert named == set(re.findall(r"(?<!\$)\$\{(\w+)", text))
    before = compose.resolved("gpu")["services"]
    for name in named:
        value = {"CPUS": "1", "MEMORY": "3G"}.get(name.rpartition("_")[2], "other")
        assert compose.resolved("gpu", environment={name: value})["services"] != before, name


def millstream_environments():
    for name, service in COMPOSE["services"].items():
        environment = service.get("environment", {})
        if name != "admin-key":  # it writes the secrets, which another service reads
            yield name, {key: str(value) for key, value in environment.items() if key.startswith("MILLSTREAM_")}
    for target in TARGETS:
        words = [word for line in STAGES[target] if line[0] == "ENV" for word in line[1:]]
        pairs = [word.split("=", 1) for word in words if word.startswith("MILLSTREAM_")]
        yield target, dict(pairs)


@pytest.mark.parametrize(("place", "environment"), list(millstream_environments()))
def test_settings_of_containers_are_settings(place, environment, monkeypatch, tmp_path):
    (tmp_path / "secret").write_text("given" * 8)
    for key, value in environment.items():
        if key in SECRET_FILES:
            assert place in COMPOSE["services"]
            monkeypatch.setenv(key, str(tmp_path / "secret"))
        else:
            assert key.removeprefix("MILLSTREAM_").lower() in settings_class().model_fields
            monkeypatch.setenv(key, default_of(value))
    Settings()


WORKERS = {"worker-cpu": ("cpu", "cpu"), "worker-gpu": ("gpu", "cuda")}


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
    assert parse_pools(f"{pool}=1")[pool].device == device
    assert of_compose(name).worker_memory is None, (
        "a share of the container's memory, so that there is one limit to change"
    )


@pytest.mark.parametrize("name", ["gateway", *WORKERS])
def test_services_of_compose_may_drain_before_they_are_killed(name):
    grace_s = int(COMPOSE["services"][name]["stop_grace_period"].removesuffix("s"))
    assert grace_s > of_compose(name).drain_s


def test_every_process_of_compose_has_a_health_check_at_a_port_that_it_serves_and_prometheus_scrapes():
    scraped = {
        host: discovery["port"]
        for job in PROMETHEUS["scrape_configs"]
        for discovery in job.get("dns_sd_configs", [])
        for host in discovery["names"]
    }
    ports = {"gateway": of_compose("gateway").http_port, "controller": of_compose("controller").metrics_port}
    ports |= {name: of_compose(name).metrics_port for name in WORKERS}
    assert scraped == ports
    for name, port in ports.items():
        service = COMPOSE["services"][name]
        if "healthcheck" in service:
            check = " ".join(service["healthcheck"]["test"])
        else:
            lines = STAGES[service["build"]["target"]]
            check = " ".join(" ".join(line) for line in lines if line[0] == "HEALTHCHECK")
        assert re.search(rf"http://127\.0\.0\.1:{port}\b", check)


def test_the_controller_of_compose_shares_redis_and_repository_with_the_others():
    services = COMPOSE["services"]
    entry = services["controller"]["entrypoint"]
    assert entry[:2] == ["python", "-m"]
    assert importlib.util.find_spec(entry[2]) is not None
    for name in ("controller", *WORKERS):
        assert services[name]["volumes"] == [services["gateway"]["volumes"][0]]
        for variable in ("MILLSTREAM_REDIS_URL", "MILLSTREAM_HOME"):
            assert services[name]["environment"][variable] == services["gateway"]["environment"][variable]


def test_secrets_are_files_of_a_volume_that_the_gateway_alone_mounts():
    """Compose refuses secrets from the environment in services with a read-only root."""
    services = COMPOSE["services"]
    assert "secrets" not in COMPOSE
    mounted = {name for name, one in services.items() for volume in one.get("volumes", []) if "admin-key" in volume}
    assert mounted == {"admin-key", "gateway"}
    for secret in ("ADMIN_KEY", "ACCESS_SECRET"):
        assert services["gateway"]["environment"][f"MILLSTREAM_{secret}_FILE"] == f"/etc/millstream/{secret.lower()}"
        given = [name for name, one in services.items() if f"MILLSTREAM_{secret}" in one.get("environment", {})]
        assert given == ["admin-key"]


def test_the_key_of_metrics_is_a_file_that_gateway_and_prometheus_read():
    """As soon as there is an API key, metrics need a key."""
    services = COMPOSE["services"]
    mounted = {name for name, one in services.items() for volume in one.get("volumes", []) if "metrics-key:" in volume}
    assert mounted == {"admin-key", "gateway", "prometheus"}
    path = services["gateway"]["environment"]["MILLSTREAM_METRICS_KEY_FILE"]
    assert all(
        f"metrics-key:{path.rpartition('/')[0]}:ro" in services[name]["volumes"] for name in ("gateway", "prometheus")
    )
    (job,) = (one for one in PROMETHEUS["scrape_configs"] if one["job_name"] == "millstream-gateway")
    assert job["authorization"] == {"credentials_file": path}


def test_shared_memory_of_the_gateway_holds_its_segments():
    size = int(COMPOSE["services"]["gateway"]["shm_size"].removesuffix("m")) << 20
    assert size >= settings_class().model_fields["shm_bytes_max"].default


def test_redis_forgets_rather_than_writes():
    command = COMPOSE["services"]["redis"]["command"]
    assert command[command.index("--save") + 1] == ""
    assert command[command.index("--appendonly") + 1] == "no"


# Prometheus and Grafana


@pytest.mark.needs("promtool")
def test_prometheus_configuration_and_rules():
    # The file of the key is in a volume of compose.
    content(program("promtool"), "check", "config", "--syntax-only", DEPLOY / "prometheus/prometheus.yml")
    content(program("promtool"), "test", "rules", *sorted((DEPLOY / "prometheus/tests").glob("*.yml")))


def test_committed_dashboards_are_what_the_generator_builds(tmp_path):
    content(sys.executable, "-m", "deploy.grafana.build", tmp_path)
    built = {path.name: path.read_text() for path in tmp_path.iterdir()}
    objects = built.pop("kubernetes.yaml")
    assert built == {path.name: path.read_text() for path in DASHBOARDS}, "run `make dashboards`"
    committed = DEPLOY / "kubernetes/components/monitoring/kubernetes.yaml"
    assert objects == committed.read_text(), "run `make dashboards`"


def test_grafana_loads_all_dashboards_and_begins_with_the_overview():
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/millstream.yml").read_text())["providers"][0]
    folder = provider["options"]["path"]
    grafana = COMPOSE["services"]["grafana"]
    assert f"./deploy/grafana/dashboards:{folder}:ro" in grafana["volumes"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (
        DASHBOARDS[DEPLOY / "grafana/dashboards" / home.removeprefix(f"{folder}/")]["title"] == "Millstream: Overview"
    )
    uids = [board["uid"] for board in DASHBOARDS.values()]
    assert uids == [f"millstream-{path.stem}" for path in DASHBOARDS]


def test_every_panel_has_a_title_of_its_own_a_unit_and_a_description():
    for path, board in DASHBOARDS.items():
        panels = [panel for panel in board["panels"] if panel["type"] != "row"]
        titles = [panel["title"] for panel in panels]
        assert len(set(titles)) == len(titles), path
        for panel in panels:
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert panel["description"].endswith("."), panel["title"]
            assert all(target["expr"] for target in panel["targets"]), panel["title"]
    assert all(len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) for board in DASHBOARDS.values())


@pytest.mark.parametrize(("title", "expression"), [*EXPRESSIONS, *RULE_EXPRESSIONS, *QUERIES])
def test_metrics_that_are_asked_for_exist(title, expression):
    names = re.findall(r"\bmillstream_\w+", re.sub(r'"[^"]*"', '""', expression))
    assert set(names) <= SAMPLES | FORTHCOMING.keys()
    labels = set(re.findall(r"(\w+)\s*=~?\s*\"", expression))
    for clause in re.findall(r"by \(([^)]*)\)", expression):
        labels |= set(re.split(r",\s*", clause))
    known = {label for metric in CATALOGUE if metric.name in expression for label in metric.labels}
    known |= {label for name in names for label in FORTHCOMING.get(name, ())}
    assert labels <= known | {"le", "job", "instance", "installation"} or not names


@pytest.mark.parametrize(("title", "expression"), [*EXPRESSIONS, *RULE_EXPRESSIONS, *QUERIES])
def test_outcomes_that_are_asked_for_are_codes(title, expression):
    for outcomes in re.findall(r'outcome=~"([^"]*)"', expression):
        assert set(outcomes.split("|")) <= set(Code)


def test_every_metric_is_on_a_dashboard():
    asked = " ".join(expression for _, expression in EXPRESSIONS)
    assert [metric.name for metric in CATALOGUE if metric.name not in asked] == []
