"""Runs the pods of deploy/kubernetes without a cluster: commands, environments, users, read-only roots, volumes,
secrets and probes, as processes with the folders that the images would have. Pods have no memory in common.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.kit import models
from tests.kit.containers.documented import run_calls
from tests.kit.containers.kubernetes import of_kind
from tests.kit.containers.pods import HEADERS, KEY, URL, Pods
from tests.kit.metrics import Page
from tests.kit.stack import CALL_S_MAX, ROOT, WAIT_S
from tests.kit.wait import wait_until

pytestmark = pytest.mark.needs("containers")

CONTENT = "application/json"
DIGITS = ROOT / "examples/digits"


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    pods = Pods(tmp_path_factory.mktemp("kubernetes"), "keda")
    try:
        for name in ("millstream-redis", "millstream-gateway", "millstream-controller"):
            pods.start(name)
        yield pods
    except BaseException:
        print(pods.output())
        raise
    finally:
        pods.host.close()


@pytest.fixture
def client(pods: Pods) -> Iterator[httpx2.Client]:
    with pods.host.network(), httpx2.Client(base_url=URL, timeout=CALL_S_MAX, trust_env=False) as client:
        yield client


def test_a_gateway_without_workers_is_ready_and_takes_models(pods: Pods, client: httpx2.Client) -> None:
    """So that a pool that was scaled to none can be asked, and a first model be uploaded."""
    pods.wait("millstream-gateway", "readinessProbe")
    model = (DIGITS / "digits.onnx").read_bytes()
    assert client.put("/admin/v1/models/digits/versions/1", content=model).status_code == 401
    uploaded = client.put("/admin/v1/models/digits/versions/1", content=model, headers=HEADERS)
    assert uploaded.status_code in (201, 202), uploaded.text


def asked_by_keda(pods: Pods, client: httpx2.Client) -> int:
    """What KEDA's trigger reads, with the key that it takes from the Secret."""
    (scaled,) = of_kind(pods.objects, "ScaledObject")
    (authentication,) = of_kind(pods.objects, "TriggerAuthentication")
    (secret,) = authentication["spec"]["secretTargetRef"]
    token = (pods.host.volume(f"secret-{secret['name']}", "0:0") / secret["key"]).read_text()
    asked = scaled["spec"]["triggers"][0]["metadata"]
    answer = client.get(urlsplit(asked["url"]).path, headers={"Authorization": f"Bearer {token}"})
    return int(answer.json()[asked["valueLocation"]]) if answer.status_code == 200 else 0


def infer(pods: Pods, request: object) -> tuple[int, str]:
    """Return the status and body of an inference, in a thread of its own."""
    with pods.host.network():
        answer = httpx2.post(f"{URL}/v2/models/digits/infer", json=request, timeout=CALL_S_MAX, trust_env=False)
        return answer.status_code, answer.text


def test_a_request_waits_while_its_pool_is_started_from_none(pods: Pods, client: httpx2.Client) -> None:
    request = json.loads((DIGITS / "request.json").read_text())
    request["parameters"] = {**request.get("parameters", {}), "timeout": round(WAIT_S * 1e6)}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(infer, pods, request)
        wait_until(lambda: asked_by_keda(pods, client) == 1, what="the waiting request wants a worker")
        assert not waiting.done(), waiting.result()
        pods.start("millstream-worker-cpu")
        status, body = waiting.result(CALL_S_MAX)
        assert status == 200, body


@pytest.mark.needs("curl")
def test_the_calls_of_the_readme_upload_a_model_and_infer(pods: Pods, client: httpx2.Client) -> None:
    assert client.delete("/admin/v1/models/digits", headers=HEADERS).status_code < 300
    uploaded, answer = run_calls(pods.host, ROOT / "deploy/kubernetes/README.md", KEY)
    assert json.loads(uploaded)["state"] == "ready"
    assert json.loads(answer)["outputs"]


def test_large_tensors_travel_through_redis(pods: Pods, client: httpx2.Client, tmp_path: Path) -> None:
    columns = 1 << 16
    model = models.scale(tmp_path / "scale.onnx", columns=columns).read_bytes()
    uploaded = client.put(f"/admin/v1/models/scale/versions/1?wait={WAIT_S:g}", content=model, headers=HEADERS)
    assert uploaded.json()["state"] == "ready", uploaded.text
    tensor = {"name": "x", "shape": [1, columns], "datatype": "FP32", "data": [1.0] * columns}
    answer = client.post("/v2/models/scale/infer", json={"inputs": [tensor]})
    assert set(answer.json()["outputs"][0]["data"]) == {2.0}
    assert Page(client.get("/metrics").text).value("millstream_segment_bytes_total") == 0


def signed(url: str, made: dict[str, str], body: bytes) -> httpx2.Response:
    """Call a gateway as boto3 does, with a signature of the key `made`."""
    request = AWSRequest("POST", f"{url}/endpoints/scale/invocations", data=body, headers={"Content-Type": CONTENT})
    credentials = Credentials(made["aws_access_key_id"], made["aws_secret_access_key"])
    SigV4Auth(credentials, "sagemaker", "eu-west-1").add_auth(request)
    return httpx2.post(
        request.url, content=body, headers=dict(request.headers.items()), timeout=CALL_S_MAX, trust_env=False
    )


def test_a_replica_verifies_signatures_of_a_key_that_another_one_made(
    pods: Pods, client: httpx2.Client, tmp_path: Path
) -> None:
    model = models.scale(tmp_path / "scale.onnx", columns=4).read_bytes()
    uploaded = client.put(f"/admin/v1/models/scale/versions/2?wait={WAIT_S:g}", content=model, headers=HEADERS)
    assert uploaded.json()["state"] == "ready", uploaded.text
    made = client.post("/admin/v1/keys", json={"name": "team", "scopes": ["infer:*"]}, headers=HEADERS).json()
    other = pods.secret("of-another-installation", "access_secret", "x" * 32)
    body = json.dumps({"instances": [[1.0, 1.0, 1.0, 1.0]]}).encode()
    replicas = [pods.replica("same-secret", 8100), pods.replica("other-secret", 8200, other)]
    answers = {}
    for replica in replicas:
        pods.host.start(replica)
    for replica in replicas:
        url = f"http://127.0.0.1:{replica.environment['MILLSTREAM_HTTP_PORT']}"
        wait_until(partial(serves, url, "scale/versions/2"), what=f"{replica.name} serves the model")
        answers[replica.name] = signed(url, made, body)
        pods.host.running.pop(replica.name).kill()
    assert answers["same-secret"].json() == {"predictions": [[2.0, 2.0, 2.0, 2.0]]}
    assert answers["other-secret"].status_code == 403
    assert "MILLSTREAM_ACCESS_SECRET differs" in answers["other-secret"].text
    assert client.delete(f"/admin/v1/keys/{made['id']}", headers=HEADERS).status_code == 200
    home = pods.host.running["millstream-worker-cpu"].run("ls", "/var/lib/millstream").stdout.split()
    assert "repository" in home
    assert "access.key" not in home, "workers could read it there"


def serves(url: str, version: str) -> bool:
    with suppress(httpx2.TransportError):
        return httpx2.get(f"{url}/v2/models/{version}/ready", headers=HEADERS, trust_env=False).status_code == 200
    return False


def test_pods_drain_and_end(pods: Pods) -> None:
    """Last: SIGTERM, as a node sends it. test_kubernetes_manifests.py compares the times."""
    for name in ("millstream-worker-cpu", "millstream-gateway", "millstream-controller"):
        assert pods.host.running[name].stop() == 0, pods.output()
    assert any("drained" in line for line in pods.host.running["millstream-worker-cpu"].output)
