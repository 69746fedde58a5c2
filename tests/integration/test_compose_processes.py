"""Runs docker-compose.yml without an engine: its commands, environments, users, working folders, read-only roots,
volumes and health checks, as processes with the folders that the images would have.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from tests.kit import models
from tests.kit.containers.compose import container, resolved
from tests.kit.containers.documented import run_calls
from tests.kit.containers.host import Container, Host
from tests.kit.containers.image import Image, product_image, prometheus_image, valkey_image
from tests.kit.metrics import Page
from tests.kit.stack import CALL_S_MAX, ROOT, WAIT_S, sigstopped
from tests.kit.wait import wait_until

pytestmark = pytest.mark.needs("containers")

STARTED = ("redis", "gateway", "controller", "worker-cpu")
DRAINING = ("gateway", "worker-cpu")
URL = "http://127.0.0.1:8000"


class Composition:
    """The services of the compose file that are needed for an inference, started in the order that it says."""

    def __init__(self, folder: Path) -> None:
        self.document = resolved()
        self.host = Host(folder, tuple(self.document["services"]))
        gateway, worker = product_image("gateway", folder / "gateway"), product_image("worker-cpu", folder / "worker")
        self.images: dict[str, Image] = {
            "redis": valkey_image(folder / "valkey"),
            **dict.fromkeys(("admin-key", "gateway", "controller"), gateway),
            "worker-cpu": worker,
        }
        self.first_key = ""  # which the gateway read when it started

    def container(self, name: str) -> Container:
        return container(self.host, self.document, name, self.images[name])

    def up(self, name: str) -> None:
        """Start a service after those that it depends on."""
        for other, how in self.document["services"][name].get("depends_on", {}).items():
            if other not in self.host.running:
                self.up(other)
            running = self.host.running[other]
            if how["condition"] == "service_completed_successfully":
                assert running.process.wait(WAIT_S) == 0, running.output
            else:
                assert how["condition"] == "service_healthy"
                running.wait_until_healthy()
        self.host.start(self.container(name))

    def key(self) -> str:
        shown = self.host.running["gateway"].run("cat", "/etc/millstream/admin_key")
        assert shown.returncode == 0, shown.stderr
        return shown.stdout.strip()

    def output(self) -> str:
        return "\n".join(f"{name}: {line}" for name, one in self.host.running.items() for line in one.output)


@pytest.fixture(scope="module")
def composition(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composition]:
    composition = Composition(tmp_path_factory.mktemp("compose"))
    try:
        for name in STARTED:
            if name not in composition.host.running:
                composition.up(name)
        for name in STARTED:
            composition.host.running[name].wait_until_healthy()
        composition.first_key = composition.key()
        yield composition
    except BaseException:
        print(composition.output())
        raise
    finally:
        composition.host.close()


@pytest.mark.needs("curl")
def test_the_calls_of_the_readme_upload_a_model_and_infer(composition: Composition) -> None:
    uploaded, answer = run_calls(composition.host, ROOT / "deploy/README.md", composition.key())
    assert json.loads(uploaded)["state"] == "ready"
    assert json.loads(answer)["outputs"]
    with composition.host.network(), httpx2.Client(base_url=URL, timeout=CALL_S_MAX, trust_env=False) as client:
        assert client.put("/admin/v1/models/digits/versions/2", content=b"no key").status_code == 401
        wait_until(lambda: client.get("/v2/health/ready").status_code == 200, what="the gateway is ready")


def metrics(client: httpx2.Client) -> Page:
    return Page(client.get("/metrics").text)


def test_large_tensors_travel_in_the_shared_memory_of_the_gateway(composition: Composition, tmp_path: Path) -> None:
    columns = 1 << 16
    model = models.scale(tmp_path / "scale.onnx", columns=columns).read_bytes()
    headers = {"Authorization": f"Bearer {composition.key()}"}
    tensor = {"name": "x", "shape": [1, columns], "datatype": "FP32", "data": [1.0] * columns}
    with composition.host.network(), httpx2.Client(base_url=URL, timeout=CALL_S_MAX, trust_env=False) as client:
        uploaded = client.put(f"/admin/v1/models/scale/versions/1?wait={WAIT_S:g}", content=model, headers=headers)
        assert uploaded.status_code == 201, uploaded.text
        before = metrics(client).value("millstream_segment_bytes_total")
        answer = client.post("/v2/models/scale/infer", json={"inputs": [tensor]})
        assert set(answer.json()["outputs"][0]["data"]) == {2.0}
        assert metrics(client).value("millstream_segment_bytes_total") >= before + 4 * columns


def test_autoscaling_without_limits_wants_what_runs(composition: Composition) -> None:
    headers = {"Authorization": f"Bearer {composition.key()}"}
    with (
        composition.host.network(),
        httpx2.Client(base_url=URL, headers=headers, timeout=CALL_S_MAX, trust_env=False) as client,
    ):
        # The first decision may be made before the worker has started.
        wait_until(lambda: client.get("/admin/v1/scale/cpu").json().get("wanted") == 1, what="a decision")
        assert client.get("/admin/v1/scale/cpu").json()["reason"] == "unbounded"
        page = client.get("http://127.0.0.1:9101/metrics").text
    assert "millstream_workers_ready{" in page
    assert "millstream_workers_wanted{" not in page


@pytest.mark.parametrize("name", STARTED)
def test_a_service_has_no_rights_and_cannot_write_to_its_root(composition: Composition, name: str) -> None:
    running = composition.host.running[name]
    status = (Path("/proc") / str(running.process.pid) / "status").read_text()
    uid = running.container.user.split(":")[0]
    assert re.search(rf"^Uid:\t{uid}\t{uid}\t", status, re.MULTILINE)
    assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
    assert re.search(r"^CapBnd:\t0+$", status, re.MULTILINE)
    assert "NoNewPrivs:\t1" in status
    for folder in ("/", "/etc", "/opt", "/usr/bin", "/var/lib"):
        refused = running.run("sh", "-c", f"echo >{folder}/file")
        assert refused.returncode != 0, folder
        assert "Read-only file system" in refused.stderr or "Permission denied" in refused.stderr


def test_only_the_gateway_can_read_the_secrets(composition: Composition) -> None:
    volume = composition.host.volume("admin-key", "10001:10001")
    assert sorted(file.name for file in volume.iterdir()) == ["access_secret", "admin_key"]
    for file in volume.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600
        for name in ("redis", "controller", "worker-cpu"):
            assert composition.host.running[name].run("cat", f"/etc/millstream/{file.name}").returncode != 0


def test_the_secret_of_api_keys_is_not_in_the_home_that_workers_mount(composition: Composition) -> None:
    home = composition.host.running["worker-cpu"].run("ls", "/var/lib/millstream")
    assert "repository" in home.stdout
    assert "access.key" not in home.stdout


def test_the_secrets_stay_until_others_are_given(composition: Composition) -> None:
    volume = composition.host.volume("admin-key", "10001:10001")
    first = composition.key()
    assert len(first) >= 40
    first_secret = (volume / "access_secret").read_text().strip()
    assert len(first_secret) >= 40
    assert first_secret != first

    def make(**environment: str) -> str:
        document = resolved(environment=environment)
        asked = container(composition.host, document, "admin-key", composition.images["admin-key"])
        asked = replace(asked, name="admin-key-again")
        assert composition.host.start(asked).process.wait(WAIT_S) == 0
        return composition.key()

    assert make() == first
    assert make(MILLSTREAM_ADMIN_KEY="another one's $key") == "another one's $key"
    assert make() == "another one's $key"
    assert (volume / "access_secret").read_text().strip() == first_secret
    make(MILLSTREAM_ACCESS_SECRET="another secret, " * 2)
    assert (volume / "access_secret").read_text() == "another secret, " * 2 + "\n"


@contextmanager
def _first_api_key(composition: Composition) -> Iterator[None]:
    """Make the first API key, with which calls begin to need keys, and remove it at the end."""
    headers = {"Authorization": f"Bearer {composition.first_key}"}
    with httpx2.Client(base_url=URL, timeout=CALL_S_MAX, trust_env=False) as client:
        made = client.post("/admin/v1/keys", json={"name": "first", "scopes": ["infer:*"]}, headers=headers)
        assert made.status_code == 201, made.text
        assert client.get("/metrics").status_code == 401
        yield
        key = f"/admin/v1/keys/{made.json()['id']}"
        assert client.delete(key, headers=headers).status_code == 200
        assert client.delete(key, params={"forget": True}, headers=headers).status_code == 200


@pytest.mark.needs("prometheus")
def test_prometheus_finds_and_scrapes_every_process(composition: Composition) -> None:
    service = composition.document["services"]["prometheus"]
    composition.images["prometheus"] = prometheus_image()
    assert service["depends_on"].keys() == {"gateway"}
    composition.up("prometheus")
    running = composition.host.running["prometheus"]
    running.wait_until_healthy()
    with (
        composition.host.network(),
        httpx2.Client(base_url="http://127.0.0.1:9090", timeout=CALL_S_MAX, trust_env=False) as client,
    ):
        assert client.get("/api/v1/rules").json()["data"]["groups"]
        jobs = {"millstream-gateway", "millstream-worker", "millstream-controller"}

        def scraped() -> bool:
            found = client.get("/api/v1/query", params={"query": "up == 1"}).json()["data"]["result"]
            return {one["metric"]["job"] for one in found} >= jobs

        wait_until(scraped, what="each process is scraped")
        with _first_api_key(composition):
            # Each scrape of the gateway after the key was made: one that was refused has up == 0.
            made_at = time.time()
            last = 'max(timestamp(up{job="millstream-gateway"} == 1))'

            def scraped_since() -> bool:
                found = client.get("/api/v1/query", params={"query": last}).json()["data"]["result"]
                return bool(found) and float(found[0]["value"][1]) > made_at

            wait_until(scraped_since, what="the gateway is scraped although metrics need a key")
    assert running.stop() == 0, running.output


def test_a_frozen_process_is_not_healthy(composition: Composition) -> None:
    running = composition.host.running["worker-cpu"]
    running.wait_until_healthy()
    with sigstopped(running.process.pid):
        assert running.run(*running.container.health).returncode != 0
    running.wait_until_healthy()


def test_services_drain_and_end(composition: Composition) -> None:
    """Last: what compose does at `down`. That they may drain before they are killed is compared in test_deploy.py."""
    for name in reversed(STARTED):
        running = composition.host.running[name]
        assert running.stop() == 0, composition.output()
        if name in DRAINING:
            assert any("drained" in line for line in running.output)
    assert not list(composition.host.shared_memory("gateway").iterdir())
