"""A model on another server: its server goes away and comes back, answers late, or serves another model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.plugins.engines.triton.health import ServerHealth
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import ModelConfig
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import Settings
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Terminated
from tests.contract.backend_cases import remote_model, same, signature
from tests.kit import models, v2
from tests.kit.grpc_proxy import tls_proxy
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.tcp_proxy import TcpProxy
from tests.kit.tls import CERTIFICATES
from tests.kit.versions import publish_content, publish_simulated
from tests.kit.wait import wait_until
from tests.kit.worker_process import running_worker

ROW = np.array([[1.0, 2.0]], np.float32)
SLOW_BYTES_S, SLOW_S = 200_000, 15  # longer than a ping may take that waits behind the tensors
FOUR = np.ones((1, 4), np.float32)
SIMULATED = signature([("x", "FP32", (-1, 4))], [("y", "FP32", (-1, 4))])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The other server, with a model that copies and one whose runs take 3 s."""
    folder = tmp_path_factory.mktemp("server")
    with running_stack(folder) as stack, running_worker(stack, "simulated"):
        stack.push("same", models.identity(folder / "same.onnx"))
        repository = FolderRepository(Settings(home=stack.home).repository_dir)
        publish_simulated(repository, "slow", {"run_s": 3})
        wait_until(lambda: stack.http.get("/v2/models/slow/ready").status_code == 200)
        yield stack


@pytest.fixture
def proxy(server: Stack) -> Iterator[TcpProxy]:
    proxy = TcpProxy(server.grpc)
    yield proxy
    proxy.close()


def test_a_server_that_goes_away_is_noticed_without_a_run(proxy: TcpProxy, tmp_path: Path) -> None:
    instance = get_backend("triton").load(remote_model(tmp_path, proxy.address, "same"), same(), "cpu", 1)
    assert instance.run({"x": ROW})[0].tolist() == ROW.tolist()
    assert instance.lost == ""
    proxy.close()
    assert proxy.address in wait_until(lambda: instance.lost)
    with pytest.raises(Failure) as caught:
        instance.run({"x": ROW})
    assert caught.value.code is Code.UNAVAILABLE
    instance.close()
    proxy.open()


def test_a_frozen_server_is_given_up_with_the_run_in_progress(server: Stack, tmp_path: Path) -> None:
    """Not only when the run's callers wait no longer, which would keep the other models of the worker waiting."""
    path = remote_model(tmp_path, server.grpc, "same", timeout_s=120)
    instances = [get_backend("triton").load(path, same(), "cpu", 1) for _ in range(6)]
    with sigstopped(server.pids()["gateway-0"]):
        with pytest.raises(Failure) as caught:
            instances[0].run({"x": ROW})
        assert caught.value.code is Code.UNAVAILABLE  # EXPIRED: only its time ended it
        wait_until(lambda: all(one.lost for one in instances), what="all are given up")
        with pytest.raises(Failure, match=server.grpc) as refused:
            instances[1].run({"x": ROW})
        assert refused.value.code is Code.UNAVAILABLE
    wait_until(lambda: not any(one.lost for one in instances), what="it is back, and nothing was unloaded meanwhile")
    for one in instances:
        assert one.run({"x": ROW})[0].tolist() == ROW.tolist()
        one.close()


def test_a_server_behind_a_slow_link_is_not_given_up_amid_a_run(server: Stack, tmp_path: Path) -> None:
    """Whether it is there is asked over another connection than the one that the tensors fill."""
    with closing(TcpProxy(server.grpc, up_bytes_s=SLOW_BYTES_S)) as proxy:
        path = remote_model(tmp_path, proxy.address, "same", timeout_s=120)
        instance = get_backend("triton").load(path, same(), "cpu", 1)
        rows = np.ones((SLOW_S * SLOW_BYTES_S // ROW.nbytes, 2), np.float32)
        assert np.array_equal(instance.run({"x": rows})[0], rows)
        assert instance.lost == ""
        instance.close()


class Counted:
    """What is checked: counts the checks."""

    def __init__(self) -> None:
        self.lost = ""
        self.checked = threading.Semaphore(0)
        self.checks = 0

    def check(self, _stub: Any) -> bool:
        self.checks += 1
        self.checked.release()
        return True

    def lose(self, reason: str) -> None:
        self.lost = reason


def test_the_interval_of_checks_stays_when_the_only_model_comes_back() -> None:
    """A thread that had not noticed yet that there was no model checked without a pause from then on."""
    health, instance = ServerHealth(lambda: (None, lambda: None), interval_s=3600), Counted()
    health.add(instance)
    health.remove(instance)
    health.add(instance)
    assert not instance.checked.acquire(timeout=0.5) or not instance.checked.acquire(timeout=0.5)
    health.remove(instance)


def test_a_check_that_cannot_be_made_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[str] = []

    def connect() -> tuple[Any, Callable[[], None]]:
        tries.append("connect")
        if len(tries) < 3:
            raise RuntimeError("can't start new thread")
        return None, lambda: tries.append("close")

    health, instance = ServerHealth(connect, interval_s=0.01), Counted()
    health.add(instance)
    assert instance.checked.acquire(timeout=30)
    health.remove(instance)
    wait_until(lambda: "close" in tries, what="the thread has ended")
    assert tries == ["connect", "connect", "connect", "close"]
    assert caplog.text.count("cannot be checked") == 1


def test_a_server_that_cannot_be_reached_is_unavailable(proxy: TcpProxy, tmp_path: Path) -> None:
    path = remote_model(tmp_path, proxy.address, "same")
    proxy.close()
    with pytest.raises(Failure, match=proxy.address) as caught:
        get_backend("triton").load(path, same(), "cpu", 1)
    assert caught.value.code is Code.UNAVAILABLE
    proxy.open()
    get_backend("triton").load(path, same(), "cpu", 1).close()


def test_a_model_that_the_server_lacks_is_unavailable_and_another_one_is_refused(server: Stack, tmp_path: Path) -> None:
    with pytest.raises(Failure, match="missing") as caught:
        get_backend("triton").load(remote_model(tmp_path, server.grpc, "missing"), same(), "cpu", 1)
    assert caught.value.code is Code.UNAVAILABLE
    with pytest.raises(Failure, match="'x' of the model 'same' is FP32, and the signature says INT64") as refused:
        get_backend("triton").load(remote_model(tmp_path, server.grpc, "same"), same("INT64"), "cpu", 1)
    assert refused.value.code is Code.MODEL


def test_a_run_has_a_deadline_and_can_be_terminated(server: Stack, tmp_path: Path) -> None:
    late = remote_model(tmp_path, server.grpc, "slow", timeout_s=0.2)
    instance = get_backend("triton").load(late, SIMULATED, "cpu", 1)
    with pytest.raises(Failure) as caught:
        instance.run({"x": FOUR})
    # It knows the deadline, and may say at once that it cannot meet it.
    assert caught.value.code in {Code.EXPIRED, Code.OVERLOADED}
    assert instance.lost == ""
    instance.close()
    instance = get_backend("triton").load(remote_model(tmp_path, server.grpc, "slow"), SIMULATED, "cpu", 1)
    instance.terminate()
    with pytest.raises(Terminated):
        instance.run({"x": FOUR})
    assert instance.run({"x": FOUR})[0].tolist() == FOUR.tolist()
    instance.close()


CA = {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(CERTIFICATES / "ca.pem")}


def test_a_server_with_tls_is_told_how_long_callers_wait(server: Stack, tmp_path: Path) -> None:
    with (
        tls_proxy(server.grpc) as proxy,
        running_stack(tmp_path / "front") as stack,
        running_worker(stack, "remote", "triton", environment=CA),
    ):
        model = {"url": f"grpcs://{proxy.address}", "model": "same"}
        publish_content(
            FolderRepository(Settings(home=stack.home).repository_dir),
            "forwarded",
            json.dumps(model).encode(),
            "triton",
            same(),
            ModelConfig(pools=("remote",), timeout_ms_default=77_000),
        )
        wait_until(lambda: stack.http.get("/v2/models/forwarded/ready").status_code == 200)
        body, headers = v2.request({"x": ROW})

        def is_told() -> bool:
            proxy.deadlines_s.clear()
            reply = stack.http.post("/v2/models/forwarded/infer", content=body, headers=headers)
            assert v2.outputs(reply.content, dict(reply.headers))["y"].tolist() == ROW.tolist()
            # gRPC rounds a deadline up, to a tenth of a second.
            return any(method == "ModelInfer" and 0 < seconds <= 77.2 for method, seconds in proxy.deadlines_s)

        # Readiness probes have no caller, and take the limit of the model file; so does a batch that has one.
        wait_until(is_told, what="a run without a readiness probe")


def test_a_server_whose_certificate_is_not_trusted_is_unavailable(server: Stack, tmp_path: Path) -> None:
    with tls_proxy(server.grpc) as proxy:
        path = remote_model(tmp_path, f"grpcs://{proxy.address}", "same")
        with pytest.raises(Failure, match=proxy.address) as caught:
            get_backend("triton").load(path, same(), "cpu", 1)
        assert caught.value.code is Code.UNAVAILABLE
    with pytest.raises(Failure, match=r"the url begins with 'https', not with grpc:// or grpcs://"):
        get_backend("triton").load(remote_model(tmp_path, "https://host:1", "same"), same(), "cpu", 1)


def test_requests_are_refused_while_the_server_is_away_and_answered_when_it_is_back(
    proxy: TcpProxy, tmp_path: Path
) -> None:
    with running_stack(tmp_path / "front") as stack, running_worker(stack, "remote", "triton"):
        publish_content(
            FolderRepository(Settings(home=stack.home).repository_dir),
            "forwarded",
            json.dumps({"url": proxy.address, "model": "same"}).encode(),
            "triton",
            same(),
            ModelConfig(pools=("remote",)),
        )
        body, headers = v2.request({"x": ROW}, parameters=v2.PATIENT)

        def status() -> int:
            return stack.http.post("/v2/models/forwarded/infer", content=body, headers=headers).status_code

        def state() -> str:
            instances = stack.http.get("/admin/v1/models/forwarded/versions/1").json().get("instances", [])
            return "".join(one["state"] for one in instances)

        wait_until(lambda: stack.http.get("/v2/models/forwarded/ready").status_code == 200)
        wait_until(lambda: status() == 200, what="it answers")
        proxy.close()
        wait_until(lambda: state() == "failed")
        wait_until(lambda: status() == 503, what="requests are refused")  # while it loads again, they wait
        proxy.open()
        wait_until(lambda: state() == "ready")
        wait_until(lambda: status() == 200, what="it answers again")
