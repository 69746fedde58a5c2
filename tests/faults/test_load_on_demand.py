"""First calls of models that no worker holds: every protocol, and memory for one model of three under load."""

from __future__ import annotations

import json
import os
import queue
import random
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc as grpc_library
import httpx2
import numpy as np
import pytest
import tritonclient.grpc as triton
from botocore.exceptions import ClientError
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from millstream import Client
from millstream.services.model.manifest import ModelConfig
from millstream.services.queue.keys import InstallationKeys
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.orders import Order
from tests.kit import models, v2
from tests.kit.command_line import Millstream
from tests.kit.sagemaker import runtime_client
from tests.kit.stack import Stack, running_stack
from tests.kit.versions import publish_simulated
from tests.kit.wait import TIMEOUT_S, wait_for_none, wait_until
from tests.kit.worker_process import running_worker

MIB = 1 << 20
MODELS = ("red", "green", "blue")
MODEL_BYTES = 200 * MIB
MEMORY = "350MiB"  # one model and the interpreter
CALLERS = 6
ANSWERS_EACH = 3  # of each model, before and after each death of the worker
DEATHS = 1
NO_ORDER = "an order cannot be read"  # logged by the worker for what is no order, after those before it
REFUSALS = {429, 503, 504}
VERTEX = "/v1/endpoints/1/deployedModels/2:predict"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("demand")
    settings = {"vertex_predict_route": VERTEX, "vertex_health_route": f"{VERTEX}-health", "sagemaker_model": "scale"}
    settings |= {"open_control": "true"}
    with running_stack(folder, gateways=2, settings=settings) as stack:
        stack.push("scale", models.scale(folder / "scale.onnx"))
        stack.push("tokens", models.embeddings(folder / "tokens.onnx"))
        yield stack


def states(stack: Stack, name: str) -> set[str]:
    """The states of a version in the gateways: they learn of a change one after the other."""
    found = set()
    for index in range(2):
        with stack.gateway(index) as gateway:
            reply = gateway.get(f"/admin/v1/models/{name}/versions/1")
        assert reply.status_code == 200, reply.text
        found.add(str(reply.json()["state"]))
    return found


def until_state(stack: Stack, name: str, wanted: str, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until all gateways know that a version is in a state."""
    wait_until(lambda: states(stack, name) == {wanted}, timeout_s, f"{name} is {wanted}")


def put_on_standby(stack: Stack, name: str, pool: str = "cpu") -> None:
    """Have the worker unload a model, as the controller does with one that idles.

    The order is repeated while the model is ready for gateways, which may know of the unload late: return when the
    worker has carried out all orders, since a late one would undo the load that the test waits for.
    """
    workers = stack.http.get("/admin/v1/workers").json()["workers"]
    worker = next(one for one in workers if one["pool"] == pool)
    order = Order(do="unload", content_id=content_id(stack, name), why="a test", token=1)
    orders = InstallationKeys(stack.installation).pool(pool).orders(worker["id"])

    def unloaded() -> bool:
        if stack.redis.exists(orders):
            return False
        found = states(stack, name)
        if found == {"ready"}:  # at first, or it was in use
            stack.redis.rpush(orders, order.model_dump_json())
        return found == {"standby"}

    wait_until(unloaded, what=f"{name} on standby")
    log = stack.home / "logs" / f"{worker['id'].rpartition('-')[0]}.log"
    before = log.read_text().count(NO_ORDER)
    stack.redis.rpush(orders, b"no order")
    wait_until(lambda: log.read_text().count(NO_ORDER) > before, what="all orders are carried out")


def content_id(stack: Stack, name: str) -> str:
    return FolderRepository(stack.home / "repository").manifest(name, 1).content_id


def rest(stack: Stack) -> None:
    body, headers = v2.request({"x": np.ones((1, 2), np.float32)})
    reply = stack.http.post("/v2/models/scale/infer", content=body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert v2.outputs(reply.content, dict(reply.headers))["y"].tolist() == [[2, 2]]


def grpc_request(model: str = "scale") -> tuple[str, list[triton.InferInput]]:
    tensor = triton.InferInput("x", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 2), np.float32))
    return model, [tensor]


def grpc(stack: Stack) -> None:
    with triton.InferenceServerClient(stack.grpc) as client:
        assert client.is_model_ready("scale")  # the gate of many clients
        assert client.infer(*grpc_request()).as_numpy("y").tolist() == [[2, 2]]


def grpc_stream(stack: Stack) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(stack.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(8):
            client.async_stream_infer(*grpc_request(), request_id=str(number))
        for number in range(8):
            result, error = answers.get(timeout=TIMEOUT_S)
            assert error is None, error
            assert result.get_response().id == str(number)
        client.stop_stream()


def post(path: str, document: Any, answer: Callable[[Any], bool], headers: dict[str, str], stack: Stack) -> None:
    reply = stack.http.post(path, json=document, headers=headers)
    assert reply.status_code == 200, reply.text
    assert answer(reply.json()), reply.text


ROWS = {"instances": [[1.0, 1.0]]}
CALLS: dict[str, Callable[[Stack], None]] = {
    "rest": rest,
    "grpc": grpc,
    "grpc-stream": grpc_stream,
    "tfserving": partial(
        post, "/v1/models/scale:predict", ROWS, lambda reply: reply["predictions"] == [[2.0, 2.0]], {}
    ),
    "torchserve": partial(post, "/predictions/scale", [1.0, 1.0], lambda reply: reply == [2.0, 2.0], {}),
    "sagemaker": partial(
        post,
        "/invocations",
        ROWS,
        lambda reply: reply == {"predictions": [[2.0, 2.0]]},
        {"X-Amzn-SageMaker-Target-Model": "scale"},
    ),
    "vertex": partial(post, VERTEX, ROWS, lambda reply: reply == {"predictions": [[2.0, 2.0]]}, {}),
    "generate": partial(post, "/v2/models/scale/generate", {"x": [1.0, 1.0]}, lambda reply: "y" in reply, {}),
    "openai": partial(
        post,
        "/v1/embeddings",
        {"model": "tokens", "input": [[1, 2, 3]]},
        lambda reply: len(reply["data"][0]["embedding"]) == 8,
        {},
    ),
}


@pytest.mark.parametrize("protocol", CALLS)
def test_the_first_call_of_every_protocol_loads_the_model(stack: Stack, protocol: str) -> None:
    name = "tokens" if protocol == "openai" else "scale"
    put_on_standby(stack, name)
    CALLS[protocol](stack)
    until_state(stack, name, "ready")


def test_a_sequence_is_refused_and_loads_nothing(stack: Stack) -> None:
    put_on_standby(stack, "scale")
    assert stack.http.get(f"{VERTEX}-health").status_code == 200  # ready, as all health checks say
    with triton.InferenceServerClient(stack.grpc) as client:
        for _ in range(2):  # of both gateways
            with pytest.raises(InferenceServerException, match="sequences are not supported"):
                client.infer(*grpc_request(), sequence_id=7, sequence_start=True)
    assert states(stack, "scale") == {"standby"}


def test_a_model_on_standby_has_no_key_in_redis(stack: Stack) -> None:
    stream = InstallationKeys(stack.installation).pool("cpu").stream(content_id(stack, "scale"))
    rest(stack)
    assert stack.redis.exists(stream)
    put_on_standby(stack, "scale")
    wait_for_none(lambda: [key for key in stack.redis.scan_iter("*") if content_id(stack, "scale").encode() in key])


class Callers:
    """Threads that call three models in turn, with random deadlines, and check every reply."""

    def __init__(self, stack: Stack) -> None:
        self.answered: Counter[str] = Counter()
        self.refused: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.calls = self.replies = 0
        self._stack = stack
        self._changing = threading.Lock()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(CALLERS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def until_all_answered(self) -> None:
        """Wait for further answers of every model."""
        before = Counter(self.answered)

        def answered() -> bool:
            return all(self.answered[name] >= before[name] + ANSWERS_EACH for name in MODELS)

        wait_until(answered, 240, f"answers of all models, not only {self.answered}")

    def _run(self, seed: int) -> None:
        draw = random.Random(seed)
        with httpx2.Client(base_url=self._stack.url, timeout=TIMEOUT_S, trust_env=False) as http:
            while not self._ended.is_set():
                self._call(http, draw.choice(MODELS), draw.choice((0.02, 0.5, 3.0, 10.0)), draw.random())

    def _call(self, http: httpx2.Client, name: str, timeout_s: float, value: float) -> None:
        sent = np.full((1, 4), value, np.float32)
        body, headers = v2.request({"x": sent}, parameters={"timeout": round(timeout_s * 1e6)})
        with self._changing:
            self.calls += 1
        reply = http.post(f"/v2/models/{name}/infer", content=body, headers=headers)
        with self._changing:
            self.replies += 1
            if reply.status_code == 200:
                self.answered[name] += 1
                [got] = v2.outputs(reply.content, dict(reply.headers)).values()
                if got.tolist() != sent.tolist():
                    self.wrong.append(f"{name}: {got} instead of {sent}")
            else:
                self.refused[reply.status_code] += 1
                if reply.status_code not in REFUSALS or not json.loads(reply.content).get("error"):
                    self.wrong.append(f"{name}: {reply.status_code} {reply.text}")
                if reply.status_code in {429, 503} and "retry-after" not in reply.headers:
                    self.wrong.append(f"{name}: {reply.status_code} without Retry-After")


def test_memory_for_one_model_of_three_loses_no_call(stack: Stack, tmp_path: Path) -> None:
    repository = FolderRepository(stack.home / "repository")
    for name in MODELS:
        publish_simulated(
            repository, name, {"bytes": MODEL_BYTES, "load_s": 0.01}, config=ModelConfig(pools=("tight",))
        )
    settings = {"worker_memory": MEMORY}
    wait_until(lambda: set(MODELS) <= {one["name"] for one in stack.http.get("/admin/v1/models").json()["models"]})
    callers = Callers(stack)
    try:
        for death in range(DEATHS + 1):
            with running_worker(stack, "tight", index=death, settings=settings) as worker:
                callers.until_all_answered()
                if death < DEATHS:
                    worker.kill()
                    worker.wait()
                else:
                    callers.end()
    finally:
        callers.end()
    assert callers.wrong == []
    assert callers.calls == callers.replies
    for name in MODELS:
        assert stack.http.delete(f"/admin/v1/models/{name}").status_code == 204


def publish(stack: Stack, name: str, pool: str, **behaviour: Any) -> None:
    repository = FolderRepository(stack.home / "repository")
    publish_simulated(repository, name, {"bytes": MODEL_BYTES} | behaviour, config=ModelConfig(pools=(pool,)))


def call(stack: Stack, name: str, timeout_s: float = 60.0) -> httpx2.Response:
    body, headers = v2.request({"x": np.ones((1, 4), np.float32)}, parameters={"timeout": round(timeout_s * 1e6)})
    return stack.http.post(f"/v2/models/{name}/infer", content=body, headers=headers)


def status(stack: Stack, name: str, wanted: int, timeout_s: float = 5.0) -> httpx2.Response | None:
    """Call a model; return the reply if it has the `wanted` status."""
    reply = call(stack, name, timeout_s)
    return reply if reply.status_code == wanted else None


def measured(stack: Stack, name: str) -> bool:
    """Whether it is known what a version takes, which is stored a moment after it is ready."""
    repository = FolderRepository(stack.home / "repository")
    return repository.footprints.measured(repository.manifest(name, 1), "simulated.cpu") is not None


def test_a_load_longer_than_the_deadline_is_refused_with_the_time_and_goes_on(stack: Stack) -> None:
    publish(stack, "slow", "slow", load_s=3.0)
    with running_worker(stack, "slow"):
        wait_until(partial(status, stack, "slow", 200), what="it answers")
        wait_until(partial(measured, stack, "slow"), what="it is known what it takes")
        put_on_standby(stack, "slow", "slow")
        refused = call(stack, "slow", 1.0)
        assert refused.status_code == 429, refused.text
        assert "is loading, about" in refused.json()["error"]
        assert int(refused.headers["retry-after"]) >= 1
        until_state(stack, "slow", "ready")  # it is loaded all the same
        put_on_standby(stack, "slow", "slow")
        raw = np.ones((1, 4), np.float32).tobytes()
        request = pb.ModelInferRequest(
            model_name="slow",
            inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 4])],
            raw_input_contents=[raw],
            parameters={"timeout": pb.InferParameter(int64_param=1_000_000)},
        )
        with grpc_library.insecure_channel(stack.grpc) as channel, pytest.raises(grpc_library.RpcError) as failed:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
        assert failed.value.code() is grpc_library.StatusCode.RESOURCE_EXHAUSTED
        metadata = dict(failed.value.trailing_metadata())
        assert int(metadata["retry-after"]) >= 1
        assert int(metadata["grpc-retry-pushback-ms"]) >= 2000
        until_state(stack, "slow", "ready")  # it is loaded all the same
    stack.http.delete("/admin/v1/models/slow")


def test_sagemakers_clients_are_told_that_a_target_model_is_not_ready(stack: Stack) -> None:
    """Their calls have no deadline of their own: that of the model counts, and its load takes longer."""
    repository = FolderRepository(stack.home / "repository")
    config = ModelConfig(pools=("late",), timeout_ms_default=1000)
    publish_simulated(repository, "late", {"bytes": MODEL_BYTES, "load_s": 3.0}, config=config)
    runtime = runtime_client(stack)
    body = json.dumps({"instances": [[1, 1, 1, 1]]}).encode()
    with running_worker(stack, "late"):
        wait_until(partial(status, stack, "late", 200, 60.0), what="it answers")
        wait_until(partial(measured, stack, "late"), what="it is known what it takes")
        put_on_standby(stack, "late", "late")
        with pytest.raises(ClientError) as refused:
            runtime.invoke_endpoint(EndpointName="any", TargetModel="late", ContentType="application/json", Body=body)
        assert refused.value.response["Error"]["Code"] == "ModelNotReadyException"
        reply = refused.value.response["ResponseMetadata"]
        assert reply["HTTPStatusCode"] == 429
        assert int(reply["HTTPHeaders"]["retry-after"]) >= 1
        until_state(stack, "late", "ready")  # it is loaded all the same
    stack.http.delete("/admin/v1/models/late")


def test_a_load_before_it_counts_in_the_time_that_a_caller_is_told(stack: Stack) -> None:
    """Loads of 2 s: alone the second model is told as about 3 s, behind the first one as 4 or 5."""
    names = ("ahead", "behind")
    for name in names:
        publish(stack, name, "queue", load_s=2.0)

    def told_s() -> int:
        for name in names:
            put_on_standby(stack, name, "queue")
        with ThreadPoolExecutor(1) as caller:
            first = caller.submit(call, stack, "ahead")
            wait_until(lambda: "standby" not in states(stack, "ahead"), what="both gateways know that the first loads")
            refused = call(stack, "behind", 1.0)
            assert refused.status_code == 429, refused.text
            assert first.result().status_code == 200
        until_state(stack, "behind", "ready")  # it is loaded all the same
        return int(refused.headers["retry-after"])

    with running_worker(stack, "queue"):
        for name in names:
            wait_until(partial(status, stack, name, 200, 30.0), what="it answers")

        def loaded_alone(name: str) -> bool:
            """Whether what its load takes is known: of loads that overlap, as on a busy machine, it is not."""
            put_on_standby(stack, name, "queue")
            return call(stack, name).status_code == 200 and measured(stack, name)

        for name in names:
            wait_until(partial(loaded_alone, name), what=f"the load of {name} is measured")
        wait_until(lambda: told_s() >= 4, 300, "the first load counts")  # on a busy machine it may be over by then
    for name in names:
        stack.http.delete(f"/admin/v1/models/{name}")


def test_the_command_says_that_a_model_is_being_loaded(stack: Stack) -> None:
    publish(stack, "long", "long", load_s=1.0)
    with running_worker(stack, "long"):
        wait_until(partial(status, stack, "long", 200), what="it answers")
        wait_until(partial(measured, stack, "long"), what="it is known what it takes")
        put_on_standby(stack, "long", "long")
        document = stack.http.get("/v2/models/long/ready").json()
        assert document["ready"]
        assert document["load_s"] >= 1.0
        command = ["predict", "long", "--example", "--endpoint", stack.url]
        code, shown = Millstream(stack.home).in_terminal(command, 100)
        assert code == 0, shown
        assert re.search(r"waiting for long \(loading, about \d", shown), shown
        wait_until(lambda: "load_s" not in stack.http.get("/v2/models/long/ready").json(), what="both know that it is")
    stack.http.delete("/admin/v1/models/long")


def test_the_command_and_the_client_wait_for_a_load_longer_than_a_request(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    repository = FolderRepository(stack.home / "repository")
    config = ModelConfig(pools=("patient",), timeout_ms_default=2000)
    publish_simulated(repository, "patient", {"load_s": 5.0}, config=config)
    with running_worker(stack, "patient"):
        wait_until(partial(status, stack, "patient", 200, 30.0), what="it answers")
        wait_until(partial(measured, stack, "patient"), what="it is known what it takes")
        put_on_standby(stack, "patient", "patient")
        done = Millstream(stack.home).run("predict", "patient", "--example", "--endpoint", stack.url)
        assert done.returncode == 0, done.stderr
        assert "model 'patient' is loading, about" in done.stderr
        assert "sent again in" in done.stderr
        put_on_standby(stack, "patient", "patient")
        with Client(stack.url, key=stack.key) as client, caplog.at_level("INFO", "millstream.client"):
            client.predict("patient", np.ones((1, 4), np.float32))
            client.predict("patient", np.ones((1, 4), np.float32))
        assert caplog.messages[0].startswith("patient is loading, predicted ")  # by the first of the two calls
    stack.http.delete("/admin/v1/models/patient")


def test_a_model_that_fails_to_load_is_refused_with_the_reason(stack: Stack) -> None:
    publish(stack, "broken", "small", load="fail")
    publish(stack, "usual", "small")
    with running_worker(stack, "small"):
        reply = wait_until(partial(status, stack, "broken", 503), what="it is refused")
        assert "the load fails" in reply.json()["error"]
        assert int(reply.headers["retry-after"]) >= 1
        wait_until(partial(status, stack, "usual", 200), what="its neighbour answers")
    for name in ("broken", "usual"):
        stack.http.delete(f"/admin/v1/models/{name}")


def test_a_gateway_that_is_killed_leaves_the_load_to_the_others(stack: Stack) -> None:
    publish(stack, "left", "left", load_s=5.0)
    with running_worker(stack, "left"):
        wait_until(partial(status, stack, "left", 200, 30.0), what="it answers")
        put_on_standby(stack, "left", "left")
        with ThreadPoolExecutor(1) as callers, stack.gateway(0) as first, stack.gateway(1) as second:
            body, headers = v2.request({"x": np.ones((1, 4), np.float32)})
            gateway = stack.pids()["gateway-0"]
            lost = callers.submit(first.post, "/v2/models/left/infer", content=body, headers=headers)
            demands = InstallationKeys(stack.installation).pool("left").demands
            wait_until(lambda: stack.redis.exists(demands) or lost.done(), what="the load is ordered")
            os.kill(gateway, signal.SIGKILL)
            assert second.post("/v2/models/left/infer", content=body, headers=headers).status_code == 200
            # On a busy machine it may have been answered by then.
            assert isinstance(lost.exception(), httpx2.TransportError) or lost.result().status_code == 200
        wait_until(lambda: stack.gateways == 2, what="the gateway is started again")
    stack.reconnect()
    stack.http.delete("/admin/v1/models/left")


def test_a_redis_that_lost_everything_gets_the_demand_again(stack: Stack) -> None:
    put_on_standby(stack, "scale")
    with ThreadPoolExecutor(4) as callers:
        calls = [callers.submit(rest, stack) for _ in range(4)]
        stack.redis.flushall()
        for one in calls:
            one.result()


def test_a_model_that_was_loaded_for_no_call_makes_room(stack: Stack) -> None:
    """As after the start of a server, which loads all models of a repository one after the other."""
    for name in ("staged", "called"):
        publish(stack, name, "single", load_s=4.0)
    with running_worker(stack, "single", settings={"worker_memory": MEMORY}):
        wait_until(partial(_holds_one_of, stack, {"staged", "called"}), what="it has loaded what fits")
        assert stack.http.post("/v2/repository/models/staged/unload").status_code == 200
        wait_until(partial(is_loaded, stack, "staged"), what="staged is ready")

        def answers() -> bool:
            """Whether `called` answers. `staged` makes room however young it is; one that was called would not."""
            reply = call(stack, "called", 30.0)
            assert reply.status_code == 200 or "were loaded a moment ago" not in reply.text, reply.text
            return reply.status_code == 200

        def made_room() -> bool:
            """On a busy machine an earlier ask for the load of `staged` may be carried out after the call."""
            return answers() and states(stack, "staged") == {"standby"}

        wait_until(made_room, what="called answers, and staged made room")
        put_on_standby(stack, "called", "single")
        wait_until(partial(is_loaded, stack, "staged"), what="staged is ready")


def is_loaded(stack: Stack, name: str) -> bool:
    """Ask for the load of a version; return whether it is ready.

    While the other version answers a readiness probe, it is in use. Once unloaded, no probe has it loaded again.
    """
    loaded = stack.http.post(f"/v2/repository/models/{name}/load")
    assert loaded.status_code == 200 or "retry-after" in loaded.headers, loaded.text
    assert "were loaded a moment ago" not in loaded.text
    return loaded.status_code == 200 and "ready" in states(stack, name)


def _holds_one_of(stack: Stack, names: set[str]) -> bool:
    listed = {one["name"]: one["versions"][0]["state"] for one in stack.http.get("/admin/v1/models").json()["models"]}
    return sorted(listed.get(name, "") for name in names) == ["ready", "standby"]
