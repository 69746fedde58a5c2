"""API keys against the running product, with real clients: two gateways, revocation, limits, signatures, audit."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import grpc
import httpx2
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError
from openai import AuthenticationError, OpenAI, PermissionDeniedError
from tritonclient.utils import InferenceServerException

from millstream.gateway.access.access_control import AGREE_S_MAX
from millstream.services.local_token import token_file
from millstream.services.queue.keys import InstallationKeys
from tests.kit import models
from tests.kit.command_line import Millstream
from tests.kit.stack import CALL_S_MAX, Stack, assert_quiet, running_stack, sigstopped
from tests.kit.tools import CLIENTS
from tests.kit.wait import wait_until

ROOT = Path(__file__).parents[2]
ADMIN = "the-admin-key-of-this-test"
ROWS = np.ones((2, 4), np.float32)
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 4], "data": ROWS.tolist()}]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("access")
    with running_stack(folder, gateways=2, settings={"admin_key": ADMIN, "shm_allow_clients": True}) as stack:
        for name, factor in (("one", 2.0), ("two", 3.0)):
            stack.push(name, models.scale(folder / f"{name}.onnx", factor, 4))
        create(stack, "first", ["infer:nothing"])  # from now on every call needs a key
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    yield served
    assert_quiet(served)


def create(stack: Stack, name: str, scopes: list[str], **more: Any) -> dict[str, Any]:
    reply = stack.http.post("/admin/v1/keys", json={"name": name, "scopes": scopes, **more})
    assert reply.status_code == 201, reply.text
    document: dict[str, Any] = reply.json()
    return document


def infer(client: httpx2.Client, key: str | None, model: str = "one", **headers: str) -> httpx2.Response:
    given = headers if key is None else {"Authorization": f"Bearer {key}", **headers}
    return client.post(f"/v2/models/{model}/infer", json=BODY, headers=given)


@pytest.fixture
def bare(stack: Stack) -> Iterator[httpx2.Client]:
    """A client without the admin key."""
    with httpx2.Client(base_url=stack.url, timeout=CALL_S_MAX, trust_env=False) as client:
        yield client


def test_a_key_infers_what_its_scope_names_and_nothing_else(stack: Stack, bare: httpx2.Client) -> None:
    key = create(stack, "scoped", ["infer:on*"])["key"]
    for _ in range(3):  # the second time the head is cached, the third time it comes from the cache
        assert infer(bare, key).status_code == 200
    assert bare.post("/v2/models/one/infer", json=BODY, headers={"X-API-Key": key}).status_code == 200
    other = infer(bare, key, "two")
    assert other.status_code == 403
    assert "lacks the scope 'infer:two'" in other.json()["error"]
    assert infer(bare, key, "unknown").status_code == 403  # which models there are stays unknown
    missing = infer(bare, None)
    assert (missing.status_code, missing.headers["www-authenticate"]) == (401, "Bearer")
    assert infer(bare, key[:-1] + ("A" if key[-1] != "A" else "B")).status_code == 401
    assert bare.get("/v2/models/one", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert bare.get("/v2/models/two", headers={"Authorization": f"Bearer {key}"}).status_code == 403
    assert bare.get("/admin/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 403
    for path in ("/metrics", "/v2/models", "/admin/v1/models", "/admin/v1/keys"):
        assert bare.get(path).status_code == 401, path
    for path in ("/v2/health/live", "/v2/health/ready", "/ping", "/docs", "/openapi.json"):
        assert bare.get(path).status_code == 200, path
    page = bare.get("/", headers={"Accept": "text/html"}).text
    assert ">one<" not in page


def test_curl(stack: Stack) -> None:
    key = create(stack, "curl", ["infer:one", "metrics"])["key"]

    def curl(*arguments: str) -> tuple[int, str]:
        command = ["curl", "-s", "-o", "-", "-w", "\n%{http_code}", *arguments]
        text, _, status = subprocess.run(command, capture_output=True, text=True, check=True).stdout.rpartition("\n")
        return int(status), text

    body = json.dumps(BODY)
    assert curl(f"{stack.url}/v2/models/one/infer", "-d", body, "-H", f"Authorization: Bearer {key}")[0] == 200
    assert curl(f"{stack.url}/v2/models/one/infer", "-d", body, "-H", f"x-api-key: {key}")[0] == 200
    assert curl(f"{stack.url}/v2/models/one/infer", "-d", body)[0] == 401
    status, page = curl(f"{stack.url}/metrics", "-H", f"Authorization: Bearer {key}")
    assert status == 200
    assert 'millstream_key_requests_total{key="curl",outcome="allowed"' in page.replace(" ", "") or "curl" in page


def test_tritonclient_over_http_and_grpc(stack: Stack) -> None:
    key = create(stack, "triton", ["infer:one"])["key"]
    headers = {"authorization": f"Bearer {key}"}
    with triton_http.InferenceServerClient(stack.url.removeprefix("http://")) as client:
        tensor = triton_http.InferInput("x", [2, 4], "FP32").set_data_from_numpy(ROWS)
        result = client.infer("one", [tensor], headers=dict(headers)).as_numpy("y")
        np.testing.assert_allclose(result, ROWS * 2)
        with pytest.raises(InferenceServerException, match="send a key"):
            client.infer("one", [tensor])
    with triton_grpc.InferenceServerClient(stack.grpc) as client:
        tensor = triton_grpc.InferInput("x", [2, 4], "FP32")
        tensor.set_data_from_numpy(ROWS)
        np.testing.assert_allclose(client.infer("one", [tensor], headers=headers).as_numpy("y"), ROWS * 2)
        assert client.infer("one", [tensor], headers={"x-api-key": key}) is not None
        with pytest.raises(InferenceServerException) as missing:
            client.infer("one", [tensor])
        assert missing.value.status() == "StatusCode.UNAUTHENTICATED"
        for call in (
            lambda: client.infer("two", [tensor], headers=headers),
            lambda: client.get_model_metadata("two", headers=headers),
            lambda: client.load_model("one", headers=headers),
            lambda: client.get_inference_statistics("two", headers=headers),
        ):
            with pytest.raises(InferenceServerException) as refused:
                call()
            assert refused.value.status() == "StatusCode.PERMISSION_DENIED"
        assert client.get_model_metadata("one", headers=headers).name == "one"
        assert {one.name for one in client.get_model_repository_index(headers=headers).models} == {"one"}
        assert {one.name for one in client.get_inference_statistics(headers=headers).model_stats} == {"one"}
        assert client.is_server_live()


@pytest.mark.parametrize("triton", [triton_http, triton_grpc])
def test_shared_memory_belongs_to_the_key_that_registered_it(stack: Stack, triton: Any) -> None:
    scopes = ["infer:one", "shared-memory"]
    kind = triton.__name__.rpartition(".")[2]
    owner, other, operator = (
        {"authorization": f"Bearer {create(stack, f'{name}-{kind}', given)['key']}"}
        for name, given in (("owner", scopes), ("other", scopes), ("operator", ["admin"]))
    )
    region, key = f"owned-{kind}", f"/test-access-{kind}-{os.getpid()}"  # the name is one for the whole machine
    handle = shm.create_shared_memory_region(region, key, ROWS.nbytes)
    where = stack.grpc if triton is triton_grpc else stack.url.removeprefix("http://")
    with triton.InferenceServerClient(where) as client:

        def names(headers: dict[str, str]) -> list[str]:
            found = client.get_system_shared_memory_status(headers=headers)
            return [one["name"] for one in found] if triton is triton_http else list(found.regions)

        def doubled(headers: dict[str, str]) -> Any:
            tensor = triton.InferInput("x", [2, 4], "FP32")
            tensor.set_shared_memory(region, ROWS.nbytes)
            return client.infer("one", [tensor], headers=headers).as_numpy("y")

        def written(headers: dict[str, str]) -> None:
            tensor = triton.InferInput("x", [2, 4], "FP32")
            tensor.set_data_from_numpy(ROWS)
            output = triton.InferRequestedOutput("y")
            output.set_shared_memory(region, ROWS.nbytes)
            client.infer("one", [tensor], outputs=[output], headers=headers)

        try:
            shm.set_shared_memory_region(handle, [ROWS])
            client.register_system_shared_memory(region, key, ROWS.nbytes, headers=dict(owner))
            np.testing.assert_allclose(doubled(dict(owner)), ROWS * 2)
            np.testing.assert_allclose(doubled(dict(operator)), ROWS * 2)
            assert (names(dict(owner)), names(dict(other))) == ([region], [])
            for refused in (
                lambda: doubled(dict(other)),
                lambda: written(dict(other)),
                lambda: client.get_system_shared_memory_status(region, headers=dict(other)),
                lambda: client.register_system_shared_memory("mine", key, ROWS.nbytes, headers=dict(other)),
            ):
                with pytest.raises(InferenceServerException, match=r"nable to find|with another key"):
                    refused()
            np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, [2, 4]), ROWS)
            client.unregister_system_shared_memory(region, headers=dict(other))
            client.unregister_system_shared_memory(headers=dict(other))
            assert names(dict(operator)) == [region]
            written(dict(owner))
            np.testing.assert_allclose(shm.get_contents_as_numpy(handle, np.float32, [2, 4]), ROWS * 2)
        finally:
            client.unregister_system_shared_memory(headers=dict(operator))
            shm.destroy_shared_memory_region(handle)
        assert names(dict(owner)) == []


def test_a_stream_ends_to_work_when_its_key_is_revoked(stack: Stack) -> None:
    created = create(stack, "stream", ["infer:one"])
    answers: list[Any] = []
    with triton_grpc.InferenceServerClient(stack.grpc) as client:
        tensor = triton_grpc.InferInput("x", [2, 4], "FP32")
        tensor.set_data_from_numpy(ROWS)
        client.start_stream(
            lambda result, error: answers.append(error or result), headers={"authorization": f"Bearer {created['key']}"}
        )
        client.async_stream_infer("one", [tensor])
        wait_until(lambda: len(answers) == 1, what="the first answer")
        assert not isinstance(answers[0], Exception)
        assert stack.http.delete(f"/admin/v1/keys/{created['id']}").status_code == 200

        def stopped() -> bool:
            seen = len(answers)
            client.async_stream_infer("one", [tensor])
            wait_until(lambda: len(answers) > seen, what="an answer")
            return isinstance(answers[-1], Exception)

        wait_until(stopped, what="the stream is refused")
        assert "revoked" in str(answers[-1])
        client.stop_stream()


@pytest.mark.needs("kserve")
def test_kserves_clients(stack: Stack) -> None:
    key = create(stack, "kserve", ["infer:one"])["key"]
    program = Path(__file__).parent / "programs" / "kserve_keys.py"
    done = subprocess.run(
        [CLIENTS / "bin" / "python", "-P", program, stack.url, stack.grpc, key, "one", "two"],
        capture_output=True,
        text=True,
        timeout=CALL_S_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    doubled = (ROWS * 2).tolist()
    rest, over_grpc = found["rest"], found["grpc"]
    assert [rest[which] for which in ("v1", "v2", "binary")] == [doubled] * 3
    assert over_grpc["infer"] == doubled
    assert rest["ready"] is over_grpc["ready"] is True
    assert "401" in rest["no key"]
    assert "403" in rest["other"]
    assert "UNAUTHENTICATED" in over_grpc["no key"]
    assert "PERMISSION_DENIED" in over_grpc["other"]
    assert key not in done.stdout


def test_openai(stack: Stack) -> None:
    key = create(stack, "openai", ["infer:one"])["key"]
    wrong = OpenAI(base_url=f"{stack.url}/v1", api_key="mr_wrong", max_retries=0)
    with pytest.raises(AuthenticationError, match="not a key"):
        wrong.embeddings.create(model="one", input="x")
    client = OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0)
    with pytest.raises(PermissionDeniedError, match="infer:two"):
        client.embeddings.create(model="two", input="x")


def runtime(stack: Stack, document: dict[str, Any], **changed: str) -> Any:
    names = {name: document[name] for name in ("aws_access_key_id", "aws_secret_access_key")} | changed
    config = Config(retries={"total_max_attempts": 1})
    return boto3.client("sagemaker-runtime", endpoint_url=stack.url, region_name="eu-west-1", config=config, **names)


def test_boto3_signs_as_it_always_does(stack: Stack) -> None:
    document = create(stack, "boto", ["infer:one"])
    call: dict[str, Any] = {
        "ContentType": "application/json",
        "Body": json.dumps({"instances": ROWS.tolist()}),
    }
    client = runtime(stack, document)
    for endpoint in ("one", "one"):
        reply = client.invoke_endpoint(EndpointName=endpoint, **call)
        np.testing.assert_allclose(json.loads(reply["Body"].read())["predictions"], ROWS * 2)
    for refused, words in (
        (runtime(stack, document, aws_secret_access_key="A" * 43), "signature is wrong"),
        (runtime(stack, document, aws_access_key_id="mr_0123456789abcdef"), "access key id"),
    ):
        with pytest.raises(ClientError, match=words) as error:
            refused.invoke_endpoint(EndpointName="one", **call)
        assert error.value.response["Error"]["Code"] == "AccessDeniedException"
    with pytest.raises(ClientError, match="infer:two"):
        client.invoke_endpoint(EndpointName="two", **call)


def signed(stack: Stack, document: dict[str, Any], path: str, body: bytes, at: datetime) -> dict[str, str]:
    """Return the headers of a request that botocore signs at another time."""
    request = AWSRequest("POST", stack.url + path, data=body, headers={"Content-Type": "application/json"})
    signer = SigV4Auth(
        Credentials(document["aws_access_key_id"], document["aws_secret_access_key"]), "sagemaker", "eu-west-1"
    )
    request.context["timestamp"] = at.strftime("%Y%m%dT%H%M%SZ")
    request.headers["X-Amz-Date"] = request.context["timestamp"]
    signer._inject_signature_to_request(
        request, signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
    )
    return dict(request.headers.items())


def test_a_signature_ends_after_15_minutes_and_covers_the_body(stack: Stack, bare: httpx2.Client) -> None:
    document = create(stack, "clock", ["infer:one"])
    path, body = "/endpoints/one/invocations", json.dumps({"instances": ROWS.tolist()}).encode()
    for minutes, status in ((0, 200), (-10, 200), (14, 200), (-16, 403), (20, 403)):
        headers = signed(stack, document, path, body, datetime.now(UTC) + timedelta(minutes=minutes))
        reply = bare.post(path, content=body, headers=headers)
        assert reply.status_code == status, (minutes, reply.text)
        if status == 403:
            assert "clock" in reply.text
    headers = signed(stack, document, path, body, datetime.now(UTC))
    assert bare.post(path, content=body + b" ", headers=headers).status_code == 403
    assert bare.post("/endpoints/two/invocations", content=body, headers=headers).status_code == 403
    # The fast path takes keys alone, and says so.
    assert "takes no other credential" in bare.post("/v2/models/one/infer", content=body, headers=headers).text


def test_a_change_of_a_key_holds_in_both_gateways_when_its_reply_comes(stack: Stack) -> None:
    """A change waits for the other gateways, but not for longer than AGREE_S_MAX."""
    connections = [httpx2.Client(base_url=stack.url, timeout=CALL_S_MAX, trust_env=False) for _ in range(12)]

    def holds(began: float, statuses: dict[str, int]) -> None:
        """Check that a change that began at an instant is in force for all connections."""
        late = time.monotonic() - began >= AGREE_S_MAX  # a gateway was held up: it need not know the change yet

        def in_force() -> bool:
            return all(infer(one, key).status_code == status for key, status in statuses.items() for one in connections)

        if late:
            wait_until(in_force, what="the change is in force")
        assert in_force()

    try:
        for one in connections:
            assert one.get("/v2/health/live").status_code == 200  # connected
        for turn in range(5):
            began = time.monotonic()
            document = create(stack, f"leaked-{turn}", ["infer:one"])
            holds(began, {document["key"]: 200})
            began = time.monotonic()
            rotated = stack.http.post(f"/admin/v1/keys/{document['id']}/rotate", json={"grace_s": 0}).json()
            holds(began, {rotated["key"]: 200, document["key"]: 401})
            began = time.monotonic()
            assert stack.http.delete(f"/admin/v1/keys/{document['id']}").json()["state"] == "revoked"
            holds(began, {rotated["key"]: 401})
        assert "revoked" in infer(connections[0], rotated["key"]).json()["error"]
    finally:
        for one in connections:
            one.close()
    stored = json.loads(next((stack.home / "repository" / "keys").glob(f"{document['id']}.json")).read_text())
    assert stored["secrets"] == []


def test_a_gateway_that_died_does_not_hold_up_changes_of_keys(tmp_path: Path) -> None:
    with running_stack(tmp_path, gateways=2, settings={"admin_key": ADMIN}) as stack:
        stack.redis.hset(InstallationKeys(stack.installation).keys_read, "killed", f"{time.time() + 3600:.3f} 0")
        create(stack, "first", ["infer:nothing"])  # fails by the client's time limit if it waits for that gateway


def test_a_rotated_key_has_two_secrets_for_a_while(stack: Stack, bare: httpx2.Client) -> None:
    first = create(stack, "rotating", ["infer:one"])
    assert infer(bare, first["key"]).status_code == 200
    second = stack.http.post("/admin/v1/keys/rotating/rotate", json={"grace_s": 3600}).json()
    assert infer(bare, second["key"]).status_code == 200
    assert infer(bare, first["key"]).status_code == 200
    third = stack.http.post("/admin/v1/keys/rotating/rotate", json={"grace_s": 0}).json()
    assert infer(bare, third["key"]).status_code == 200
    for old in (first["key"], second["key"]):
        assert infer(bare, old).status_code == 401
    assert len(stack.http.get("/admin/v1/keys/rotating").json()["secrets"]) == 1


@pytest.mark.parametrize("asked", ["allow_pickle", "allow_code"])
def test_what_can_execute_code_needs_the_right_to_code(stack: Stack, bare: httpx2.Client, asked: str) -> None:
    writer = create(stack, f"writer-{asked}", ["models:write"])["key"]
    path = f"/admin/v1/models/code-{asked}/versions?{asked}=true"
    said = bare.post(path, content=b"no model", headers={"authorization": f"Bearer {writer}"})
    assert said.status_code == 403
    assert f"lacks the scope 'models:code', which {asked} needs here" in said.json()["error"]
    plain = bare.post(path.partition("?")[0], content=b"no model", headers={"authorization": f"Bearer {writer}"})
    assert plain.status_code == 400
    assert bare.post(path, content=b"no model", headers={"authorization": f"Bearer {ADMIN}"}).status_code == 400


def test_an_expired_key_is_refused(stack: Stack, bare: httpx2.Client) -> None:
    for life_s in (1.5, 10.0, 60.0):  # a machine that is held up may not call in time
        key = create(stack, f"short-{life_s:g}", ["infer:one"], expires_in_s=life_s)["key"]
        if infer(bare, key).status_code == 200:
            break
    else:
        pytest.fail("no key was good before it expired")
    wait_until(lambda: infer(bare, key).status_code == 401, what="the key expires")
    assert "expired" in infer(bare, key).json()["error"]


def test_a_limit_holds_over_two_gateways(stack: Stack) -> None:
    rate = 20.0
    key = create(stack, "limited", ["infer:one"], limits={"requests_per_s": rate})["key"]
    connections = [httpx2.Client(base_url=stack.url, timeout=CALL_S_MAX, trust_env=False) for _ in range(8)]
    began = time.monotonic()
    seconds = 10.0  # gateways that did not share the limit would let in 440 calls

    def flood(client: httpx2.Client) -> list[httpx2.Response]:
        found: list[httpx2.Response] = []
        while time.monotonic() - began < seconds or not any(reply.status_code == 429 for reply in found):
            found.append(infer(client, key))
        return found

    try:
        with ThreadPoolExecutor(8) as pool:
            replies = [reply for part in pool.map(flood, connections) for reply in part]
    finally:
        for one in connections:
            one.close()
    lasted = time.monotonic() - began
    allowed = sum(reply.status_code == 200 for reply in replies)
    refused = [reply for reply in replies if reply.status_code == 429]
    assert len(refused) + allowed == len(replies)
    # Each gateway begins with a full bucket and learns of the other's use some tenths of a second late.
    assert allowed <= rate * (lasted + 2 * 2 + 2), (allowed, lasted)
    assert int(refused[-1].headers["retry-after"]) >= 1
    assert refused[-1].headers["ratelimit-policy"] == '"requests";q=20;w=1'
    assert refused[-1].headers["ratelimit"].startswith('"requests";r=0;t=')


def test_limits_on_rows_concurrency_and_compute(stack: Stack, bare: httpx2.Client) -> None:
    rows = create(stack, "rows", ["infer:one"], limits={"rows_per_s": 0.5})["key"]
    assert infer(bare, rows).status_code == 200
    wait_until(lambda: infer(bare, rows).status_code == 429, what="the rows are used up")
    reply = infer(bare, rows)
    if reply.status_code == 429:
        assert "rows/s" in reply.json()["error"]
    compute = create(stack, "compute", ["infer:one"], limits={"compute_s_per_minute": 1e-6})["key"]
    wait_until(lambda: infer(bare, compute).status_code == 429, what="the measured time of runs is used up")
    alone = create(stack, "alone", ["infer:one"], limits={"concurrency": 1})["key"]
    for _ in range(5):  # each call ends before the next begins, whatever its outcome
        assert infer(bare, alone).status_code == 200
        assert (
            bare.post("/v2/models/one/infer", content=b"{", headers={"Authorization": f"Bearer {alone}"}).status_code
            == 400
        )
        assert bare.get("/v2/models/one", headers={"Authorization": f"Bearer {alone}"}).status_code == 200


def test_grpc_limits_say_when_to_try_again(stack: Stack) -> None:
    key = create(stack, "grpc-limited", ["infer:one"], limits={"requests_per_s": 0.01})["key"]
    with grpc.insecure_channel(stack.grpc) as channel:
        ready = channel.unary_unary("/inference.GRPCInferenceService/ModelReady")
        with pytest.raises(grpc.RpcError) as refused:
            for _ in range(20):
                ready(b"\x0a\x03one", metadata=(("authorization", f"Bearer {key}"),))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert {"retry-after", "ratelimit", "ratelimit-policy", "grpc-retry-pushback-ms"} <= {
        name for name, _ in refused.value.trailing_metadata() or ()
    }


def test_wrong_keys_take_no_memory_and_no_key_is_in_a_log(stack: Stack, bare: httpx2.Client) -> None:
    document = create(stack, "quiet", ["infer:one"])
    for number in range(300):
        assert infer(bare, f"mr_{number:016x}_{'a' * 43}").status_code == 401
        if number % 100 == 0:
            assert infer(bare, document["key"]).status_code == 200
    stack.http.post("/admin/v1/keys/quiet/rotate")
    secret = document["aws_secret_access_key"]
    audit = stack.http.get("/admin/v1/audit", params={"limit": 1000}).text
    texts = [audit, "\n".join(stack.lines), stack.logs()]
    texts += [path.read_text() for path in (stack.home / "repository" / "audit").glob("*.jsonl")]
    texts += [path.read_text() for path in (stack.home / "repository" / "keys").glob("*.json")]
    texts += [path.read_text(errors="replace") for path in (stack.home / "logs").rglob("*") if path.is_file()]
    assert not any(secret in text or ADMIN in text for text in texts)


def test_the_audit_log_says_who_changed_what(stack: Stack, bare: httpx2.Client) -> None:
    writer = create(stack, "writer", ["models:write"])
    headers = {"Authorization": f"Bearer {writer['key']}"}
    assert bare.delete("/admin/v1/models/nothing", headers=headers).status_code == 404
    assert bare.post("/admin/v1/keys", json={"name": "x", "scopes": ["admin"]}, headers=headers).status_code == 403
    entries = stack.http.get("/admin/v1/audit", params={"limit": 1000}).json()["entries"]
    mine = [entry for entry in entries if entry["key"] == writer["id"]]
    assert [(entry["what"], entry["target"], entry["outcome"]) for entry in mine] == [
        ("delete_model", "DELETE /admin/v1/models/nothing", 404),
        ("create_key", "POST /admin/v1/keys", 403),
    ]
    assert all("writer" in entry["by"] and entry["address"] == "127.0.0.1" for entry in mine)
    made = [entry for entry in entries if any(writer["id"] in change for change in entry["changes"])]
    assert [(entry["what"], entry["by"], entry["outcome"]) for entry in made] == [("create_key", "admin key", 201)]


def test_a_damaged_document_is_named_and_removed_on_request(stack: Stack) -> None:
    damaged = stack.home / "repository" / "keys" / f"{'d' * 16}.json"
    damaged.write_text("{")
    assert stack.http.get("/admin/v1/keys").json()["damaged"] == [damaged.stem]
    assert stack.http.delete(f"/admin/v1/keys/{damaged.stem}").status_code == 404
    reply = stack.http.delete(f"/admin/v1/keys/{damaged.stem}", params={"forget": True})
    assert (reply.status_code, reply.json()["state"]) == (200, "forgotten")
    assert stack.http.get("/admin/v1/keys").json()["damaged"] == []
    assert not damaged.exists()


def test_the_token_of_the_home_administers_and_nothing_else_without_a_key(tmp_path: Path) -> None:
    with running_stack(tmp_path, gateways=2) as stack, httpx2.Client(base_url=stack.url, trust_env=False) as bare:
        path = models.scale(tmp_path / "one.onnx", 2.0, 4)
        stack.push("one", path)
        token = token_file(stack.home)
        assert token.stat().st_mode & 0o777 == 0o600
        assert infer(bare, None).status_code == 200
        assert bare.get("/admin/v1/models").status_code == 401
        sent = subprocess.run(
            ["curl", "-s", "-H", f"@{token}", f"{stack.url}/admin/v1/models"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(sent.stdout)["models"][0]["name"] == "one"
        cli = Millstream(stack.named_home)
        assert [one["name"] for one in cli.json("models")] == ["one"]
        first = create(stack, "team", ["infer:one"])  # from now on every call needs a key
        assert infer(bare, None).status_code == 401
        assert infer(bare, first["key"]).status_code == 200
        create(stack, "root", ["admin"])
        assert [one["name"] for one in cli.json("models")] == ["one"]
        assert any(entry["by"] == "local caller" for entry in stack.http.get("/admin/v1/audit").json()["entries"])


def test_the_command_line(stack: Stack, bare: httpx2.Client) -> None:
    cli = Millstream(stack.named_home, ADMIN)
    created = cli.json("keys", "create", "cli", "--scope", "infer:one", "--rate", "100", "--expires", "1h")
    assert created["key"] == f"mr_{created['id']}_{created['aws_secret_access_key']}"
    assert created["limits"]["requests_per_s"] == 100
    assert 3500 < created["expires_at"] - created["created_at"] < 3700
    assert infer(bare, created["key"]).status_code == 200
    measured = Millstream(stack.named_home, created["key"]).fails("bench", "one", "--seconds", "0.1")
    assert "lacks the scope 'metrics'" in measured
    assert cli.json("bench", "one", "--seconds", "0.1", "--connections", 2)["errors"] == {}
    assert "infer:one" in cli.ok("keys", "list")
    page = stack.metrics()
    assert page.value("millstream_key_expiry_timestamp_seconds", key="cli") == pytest.approx(created["expires_at"])
    assert page.value("millstream_key_requests_total", key="cli", outcome="allowed") >= 1
    rotated = cli.ok("keys", "rotate", "cli", "--grace", "0s")
    assert created["key"] not in rotated
    assert infer(bare, created["key"]).status_code == 401
    assert "revoked" in cli.ok("keys", "revoke", "cli")
    assert "there is a key" not in cli.fails("keys", "revoke", "nobody")
    for odd in ("a b", "../a", "ключ", "a" * 65, "a\nb"):
        assert "begins with a letter or a digit" in cli.fails("keys", "create", odd, "--scope", "infer:one")
    assert "revoked" in cli.ok("keys", "revoke", "cli", "--forget")
    assert "key forgotten" in cli.ok("audit", "-n", "50")
    assert "cli" not in {key["name"] for key in cli.json("keys", "list")["keys"]}


def test_changes_over_grpc_are_in_the_audit_log(stack: Stack) -> None:
    with triton_grpc.InferenceServerClient(stack.grpc) as client:
        with pytest.raises(InferenceServerException):
            client.load_model("nothing", headers={"authorization": f"Bearer {ADMIN}"})
        with pytest.raises(InferenceServerException, match="send a key"):
            client.unload_model("one")

    def entries() -> list[dict[str, Any]]:
        found = stack.http.get("/admin/v1/audit", params={"limit": 1000}).json()["entries"]
        return [entry for entry in found if entry["what"].startswith("RepositoryModel")]

    mine = entries()
    assert [(entry["what"], entry["by"]) for entry in mine] == [("RepositoryModelLoad", "admin key")]
    assert mine[0]["outcome"] != "OK"


def test_a_key_is_revoked_although_redis_is_frozen(tmp_path: Path) -> None:
    """Keys are in the repository: the gateway that revokes one, and every other, refuses it without Redis."""
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, gateways=2, models={"one": path}, settings={"admin_key": ADMIN}) as stack:
        document = create(stack, "leaked", ["infer:one"])
        with stack.gateway(0) as first, stack.gateway(1) as second:
            assert {known(one, document["key"]) for one in (first, second)} == {200}
            with sigstopped(stack.pids()["redis"]):
                answer = first.delete(f"/admin/v1/keys/{document['id']}", headers={"authorization": f"Bearer {ADMIN}"})
                assert answer.json()["state"] == "revoked"
                for one in (first, second):
                    wait_until(lambda: known(one, document["key"]) == 401, what="it is refused")  # noqa: B023


def known(gateway: httpx2.Client, key: str) -> int:
    """Return the status of a call that needs no Redis."""
    return gateway.get("/v2/models/one", headers={"authorization": f"Bearer {key}"}).status_code
