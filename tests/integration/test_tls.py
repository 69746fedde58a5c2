"""An installation over TLS: the clients that people have, certificates renewed under load, and those of clients."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import grpc
import httpx2
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from millstream.client.client import Client
from millstream.client.errors import Cause, ConnectionFailed
from millstream.services.cli.doctor.machine import certificate_checks
from millstream.services.environment import child_environment
from millstream.services.errors import Failure
from millstream.services.health import fault
from millstream.services.settings import Settings
from millstream.services.supervisor.start_checks import check_tls
from millstream.services.tls.files import TlsFiles
from millstream.services.tls.identity import load_identity
from tests.kit import models
from tests.kit.certificates import Authority, Pair, replace
from tests.kit.stack import WAIT_S, Stack, running_stack
from tests.kit.tools import program
from tests.kit.wait import wait_until

pytestmark = [pytest.mark.needs("openssl"), pytest.mark.filterwarnings("ignore:.*ssl.PROTOCOL_TLS")]
DATA = np.arange(4, dtype=np.float32).reshape(2, 2)
REQUEST = {"inputs": [{"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [0, 1, 2, 3]}]}
RENEWALS = 3


class Secure(NamedTuple):
    """A stack, and the files of its TLS."""

    stack: Stack
    authority: Authority
    served: Pair
    client: Pair

    @property
    def roots(self) -> bytes:
        return self.authority.certificate.read_bytes()

    def channel(self, *pair: bytes) -> grpc.Channel:
        """Return a new channel; `pair`: key and certificate of the client."""
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        port = self.stack.grpc.rpartition(":")[2]
        return grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(self.roots, *pair), options)

    def live(self, *pair: bytes) -> bool:
        with self.channel(*pair) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            return bool(stub.ServerLive(pb.ServerLiveRequest(), timeout=WAIT_S).live)

    def shown(self, port: int) -> str:
        """Return the certificate that a new connection is shown."""
        return ssl.get_server_certificate(("127.0.0.1", port), timeout=WAIT_S)

    def renew(self, pair: Pair) -> None:
        """Put a pair in the place of the one that is served, and wait until all gateways have it."""
        said = "new connections get the certificate that"
        before = self.stack.logs().count(said)
        pair.copy_to(self.served)
        wait_until(lambda: self.stack.logs().count(said) == before + self.stack.gateways, WAIT_S)
        expected = ssl.PEM_cert_to_DER_cert(pair.certificate.read_text())
        for port in (self.stack.port, int(self.stack.grpc.rpartition(":")[2])):
            assert ssl.PEM_cert_to_DER_cert(self.shown(port)) == expected


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def secure(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("tls")
    served = Pair(folder / "tls.crt", folder / "tls.key")
    authority.issue().copy_to(served)
    settings = {"tls_cert_file": served.certificate, "tls_key_file": served.key, "ca_file": authority.certificate}
    with running_stack(folder, gateways=2, settings=settings) as stack:
        stack.push("tls", models.scale(folder / "m.onnx"))
        yield Secure(stack, authority, served, authority.issue())


def values(reply: httpx2.Response) -> list[float]:
    assert reply.status_code == 200, reply.text
    data: list[float] = reply.json()["outputs"][0]["data"]
    return data


def test_addresses_say_that_they_are_secure(secure: Secure) -> None:
    assert secure.stack.url.startswith("https://127.0.0.1:")
    assert "grpcs://127.0.0.1:" in secure.stack.wait_for_line("grpc  ")


def test_httpx2(secure: Secure) -> None:
    stack = secure.stack
    name = stack.http.get("/v2/models/tls").json()["inputs"][0]["name"]
    body = {"inputs": [{**REQUEST["inputs"][0], "name": name}]}
    with httpx2.Client(base_url=stack.url, verify=stack.tls or True, timeout=WAIT_S, trust_env=False) as client:
        assert len(values(client.post("/v2/models/tls/infer", json=body))) == 4


@pytest.mark.needs("curl")
def test_curl(secure: Secure) -> None:
    def curl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [program("curl"), "-sS", "--noproxy", "*", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)

    url = f"{secure.stack.url}/v2/health/live"
    trusted = curl("--cacert", str(secure.authority.certificate), "-o", "/dev/null", "-w", "%{http_code}", url)
    assert (trusted.returncode, trusted.stdout) == (0, "200"), trusted.stderr
    assert curl(url).returncode == 60  # the certificate is of an unknown authority
    assert "call https://" in curl(url.replace("https:", "http:")).stdout


def test_tritonclient_over_http(secure: Secure) -> None:
    host = secure.stack.url.removeprefix("https://")
    options = {"ca_certs": str(secure.authority.certificate)}
    with triton_http.InferenceServerClient(host, ssl=True, ssl_options=options) as client:
        inputs, outputs = _names(client.get_model_metadata("tls"))
        tensor = triton_http.InferInput(inputs, [2, 2], "FP32")
        tensor.set_data_from_numpy(DATA)
        assert client.infer("tls", [tensor]).as_numpy(outputs).shape == (2, 2)


def test_tritonclient_over_grpc(secure: Secure) -> None:
    host = secure.stack.grpc
    with triton_grpc.InferenceServerClient(
        host, ssl=True, root_certificates=str(secure.authority.certificate)
    ) as client:
        inputs, outputs = _names(client.get_model_metadata("tls", as_json=True))
        tensor = triton_grpc.InferInput(inputs, [2, 2], "FP32")
        tensor.set_data_from_numpy(DATA)
        assert client.infer("tls", [tensor]).as_numpy(outputs).shape == (2, 2)


def _names(metadata: dict[str, list[dict[str, str]]]) -> tuple[str, str]:
    return metadata["inputs"][0]["name"], metadata["outputs"][0]["name"]


def test_grpc_clients_must_trust_the_authority(secure: Secure, tmp_path: Path) -> None:
    assert secure.live()
    stranger = secure._replace(authority=Authority(tmp_path, "stranger"))
    with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        stranger.live()


@pytest.mark.parametrize("arguments", [["models"], ["top", "--once"], ["doctor", "--json"]])
def test_the_command_line_trusts_the_installation_of_its_home(secure: Secure, arguments: list[str]) -> None:
    """It trusts the certificate itself, whatever name and authority it has."""
    environment = child_environment({"MILLSTREAM_HOME": str(secure.stack.home), "NO_COLOR": "1"})
    command = [sys.executable, "-m", "millstream.services.cli", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if arguments[0] == "doctor":
        assert "Controller" in {check["name"] for check in json.loads(done.stdout)["checks"]}
    else:
        assert "tls" in done.stdout


def test_the_python_client_trusts_the_authority(secure: Secure, tmp_path: Path) -> None:
    with Client(secure.stack.url, key=secure.stack.key, ca_file=secure.authority.certificate, retries=0) as client:
        assert [model["name"] for model in client.models()] == ["tls"]
    with Client(
        secure.stack.url, key=secure.stack.key, ca_file=Authority(tmp_path, "stranger").certificate, retries=0
    ) as client:
        with pytest.raises(ConnectionFailed, match="MILLSTREAM_CA_FILE") as caught:
            client.models()
        assert caught.value.cause is Cause.TLS


def test_replies_name_https(secure: Secure) -> None:
    """Routes see the scheme of the request."""
    assert secure.stack.http.get("/docs").status_code == 200
    assert secure.stack.http.get("/openapi.json").status_code == 200


def test_certificates_are_renewed_under_load(secure: Secure) -> None:
    stop, failures, answered = threading.Event(), [], {"http": 0, "grpc": 0}
    name = secure.stack.http.get("/v2/models/tls").json()["inputs"][0]["name"]
    body = {"inputs": [{**REQUEST["inputs"][0], "name": name}]}

    def over_new_connections() -> None:
        trusting = secure.stack.tls or True
        with httpx2.Client(base_url=secure.stack.url, verify=trusting, timeout=WAIT_S, trust_env=False) as client:
            assert len(values(client.post("/v2/models/tls/infer", json=body))) == 4

    def repeat(kind: str, call: Callable[[], object]) -> None:
        while not stop.is_set():
            try:
                call()
                answered[kind] += 1
            except Exception as error:
                failures.append(error)

    with secure.channel() as kept:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(kept)
        calls = [
            ("http", over_new_connections),
            ("http", lambda: values(secure.stack.http.post("/v2/models/tls/infer", json=body))),
            ("grpc", secure.live),
            ("grpc", lambda: stub.ServerLive(pb.ServerLiveRequest(), timeout=WAIT_S)),
        ]
        threads = [threading.Thread(target=repeat, args=call) for call in calls]
        for thread in threads:
            thread.start()
        try:
            for days in range(60, 60 + RENEWALS):
                renewed = secure.authority.issue(days=days, kind=("ec", "rsa")[days % 2])
                secure.renew(renewed)
                ends = load_identity(TlsFiles(*renewed)).validity.ends
                page = secure.stack.metrics()
                for listener in ("http", "grpc"):
                    series = "millstream_tls_certificate_expiry_timestamp_seconds"
                    assert page.value(series, listener=listener) == ends
        finally:
            stop.set()
            for thread in threads:
                thread.join(WAIT_S)
    assert failures == []
    assert all(answered.values())


def test_a_pair_that_does_not_fit_leaves_the_old_one(secure: Secure) -> None:
    certificate, key = (path.read_bytes() for path in secure.served)
    replace(secure.served.key, secure.authority.issue().key.read_bytes())
    wait_until(lambda: "the certificate that was read before is still served" in secure.stack.logs())
    assert secure.live()
    assert secure.shown(secure.stack.port).strip() in certificate.decode()
    replace(secure.served.key, key)
    secure.renew(secure.authority.issue(days=80))


def test_unfinished_handshakes_do_not_delay_the_end(secure: Secure, tmp_path: Path) -> None:
    settings = {"tls_cert_file": secure.served.certificate, "tls_key_file": secure.served.key}
    settings |= {"ca_file": secure.authority.certificate}
    with ExitStack() as open_sockets, running_stack(tmp_path, settings=settings) as stack:
        for _ in range(10):
            half = open_sockets.enter_context(socket.create_connection(("127.0.0.1", stack.port)))
            half.sendall(b"\x16\x03\x01")


def test_grpc_on_our_own_connections(authority: Authority, tmp_path: Path) -> None:
    """gRPC on connections of our own: the same certificate, renewal and clients' certificates."""
    served, client = Pair(tmp_path / "tls.crt", tmp_path / "tls.key"), authority.issue()
    authority.issue().copy_to(served)
    settings = {
        "tls_cert_file": served.certificate,
        "tls_key_file": served.key,
        "tls_client_ca_file": authority.certificate,
        "ca_file": authority.certificate,
        "client_cert_file": client.certificate,
        "client_key_file": client.key,
    }
    with running_stack(tmp_path, settings=settings) as stack:
        secure = Secure(stack, authority, served, client)
        own = client.key.read_bytes(), client.certificate.read_bytes()
        roots, chain, key = map(str, (authority.certificate, client.certificate, client.key))
        with triton_grpc.InferenceServerClient(
            stack.grpc, ssl=True, root_certificates=roots, certificate_chain=chain, private_key=key
        ) as triton:
            assert triton.is_server_live()
            authority.issue(days=70, kind="rsa").copy_to(served)
            series = "millstream_tls_certificate_expiry_timestamp_seconds"
            ends = load_identity(TlsFiles(*served)).validity.ends
            wait_until(lambda: stack.metrics().value(series, listener="grpc") == ends)
            assert triton.is_server_live()  # on the connection that it has
        assert secure.live(*own)
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            secure.live()
        with grpc.insecure_channel(stack.grpc) as plain, pytest.raises(grpc.RpcError, match="HTTP status 400"):
            service_pb2_grpc.GRPCInferenceServiceStub(plain).ServerLive(pb.ServerLiveRequest(), timeout=WAIT_S)


@pytest.fixture(scope="module")
def mutual(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("mutual")
    served, client = authority.issue(), authority.issue()
    settings = {
        "tls_cert_file": served.certificate,
        "tls_key_file": served.key,
        "tls_client_ca_file": authority.certificate,
        "ca_file": authority.certificate,
        "client_cert_file": client.certificate,
        "client_key_file": client.key,
    }
    with running_stack(folder, settings=settings, models={"m": models.scale(folder / "m.onnx")}) as stack:
        yield Secure(stack, authority, served, client)


def test_http_clients_need_a_certificate(mutual: Secure, tmp_path: Path) -> None:
    assert mutual.stack.http.get("/v2/health/live").status_code == 200
    with Client(mutual.stack.url, ca_file=mutual.authority.certificate, retries=0) as client:
        with pytest.raises(ConnectionFailed, match="set MILLSTREAM_CLIENT_CERT_FILE") as caught:
            client.models()
        assert caught.value.cause is Cause.TLS
    stranger = Authority(tmp_path, "stranger").issue()
    context = ssl.create_default_context(cafile=mutual.authority.certificate)
    context.load_cert_chain(*stranger)
    with (
        httpx2.Client(base_url=mutual.stack.url, verify=context, timeout=WAIT_S, trust_env=False) as other,
        pytest.raises(httpx2.HTTPError, match="UNKNOWN_CA"),
    ):
        other.get("/v2/health/live")


def test_grpc_clients_need_a_certificate(mutual: Secure, tmp_path: Path) -> None:
    assert mutual.live(mutual.client.key.read_bytes(), mutual.client.certificate.read_bytes())
    stranger = Authority(tmp_path, "stranger").issue()
    for pair in ((), (stranger.key.read_bytes(), stranger.certificate.read_bytes())):
        with pytest.raises(grpc.RpcError) as caught:
            mutual.live(*pair)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def refusal_of_up(tmp_path: Path, *arguments: str | Path) -> str:
    command = [sys.executable, "-m", "millstream.services.cli", "up", "--home", tmp_path / "home", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "home").exists()
    return done.stderr


def test_up_refuses_files_that_it_cannot_use(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue(), authority.issue()
    assert "MILLSTREAM_TLS_KEY_FILE" in refusal_of_up(tmp_path, "--tls-cert", pair.certificate)
    said = refusal_of_up(tmp_path, "--tls-cert", pair.certificate, "--tls-key", other.key)
    assert "the key is not that of the certificate" in said


def test_up_needs_a_certificate_if_clients_do(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = authority.issue()
    settings = Settings(tls_cert_file=pair.certificate, tls_key_file=pair.key, tls_client_ca_file=authority.certificate)
    with pytest.raises(Failure, match="set MILLSTREAM_CLIENT_CERT_FILE and MILLSTREAM_CLIENT_KEY_FILE"):
        check_tls(settings)
    monkeypatch.setenv("MILLSTREAM_CLIENT_CERT_FILE", str(pair.certificate))
    check_tls(settings)
    check_tls(Settings())


def test_doctor_checks_the_certificate(authority: Authority, tmp_path: Path) -> None:
    def states(pair: Pair) -> list[tuple[str, str]]:
        settings = Settings(tls_cert_file=pair.certificate, tls_key_file=pair.key)
        return [(check.name, check.state) for check in certificate_checks(settings)]

    pair = Pair(tmp_path / "tls.crt", tmp_path / "tls.key")
    authority.issue().copy_to(pair)
    pair.key.chmod(0o600)
    assert states(pair) == [("Certificate", "ok")]
    pair.key.chmod(0o644)
    assert states(pair) == [("Certificate", "ok"), ("Private key", "warn")]
    for days in (-1, 5):
        authority.issue(days=days).copy_to(pair)
        pair.key.chmod(0o600)
        assert states(pair) == [("Certificate", "warn")]
    replace(pair.key, authority.issue().key.read_bytes())
    assert states(pair)[0] == ("Certificate", "fail")
    assert certificate_checks(Settings()) == []
    assert certificate_checks(Settings(tls_key_file=pair.key))[0].state == "fail"


def health(secure: Secure, **environment: str) -> int:
    """Return how the health check of the images ends."""
    where = f"http://127.0.0.1:{secure.stack.port}"
    command = (sys.executable, "-m", "millstream.services.health", where, "/v2/health/live")
    settings = {"MILLSTREAM_TLS_CERT_FILE": str(secure.served.certificate), **environment}
    return subprocess.run(command, env=child_environment(settings), timeout=WAIT_S, check=False).returncode


def test_the_health_check_of_the_images_asks_over_tls(secure: Secure) -> None:
    wait_until(lambda: health(secure) == 0, what="it answers within the check's two seconds")
    assert fault(f"https://127.0.0.1:{secure.stack.port}/v2/nothing") is not None
    assert fault(f"http://127.0.0.1:{secure.stack.port}/v2/health/live") is not None


def test_a_gateway_that_wants_a_certificate_is_healthy(mutual: Secure) -> None:
    wait_until(lambda: health(mutual) == 0, what="it answers within the check's two seconds")
