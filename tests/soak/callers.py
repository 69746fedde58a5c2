"""Callers of a soak: each sends requests whose answers it knows, one after the other, and counts the outcomes.

next request ─> REST or gRPC ─> right | refused (429, 503) | cut (its gateway was killed) | failed
"""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.kit import v2

ANSWER_S_MAX = 60.0
REFUSED_S = 0.05  # pause after a refusal or a lost connection; shorter than Retry-After, since the soak needs load


#: kind of an outcome, and what was wrong with it
Outcome = tuple[str, str]
REFUSED: Outcome = ("refused", "")


class Question:
    """A request and a check of its outputs."""

    def __init__(self, model: str, inputs: dict[str, Any], right: Callable[[dict[str, Any]], bool]) -> None:
        self.model = model
        self.path = f"/v2/models/{model}/infer"
        self.body, self.headers = v2.request(inputs)
        self.message = pb.ModelInferRequest(model_name=model)
        for name, array in inputs.items():
            self.message.inputs.add(name=name, datatype="FP32", shape=array.shape)
            self.message.raw_input_contents.append(array.tobytes())
        self._right = right

    def judged(self, outputs: dict[str, Any]) -> Outcome:
        """Return the outcome of a request with these outputs."""
        return ("right", "") if self._right(outputs) else ("failed", f"{self.model}: wrong values")


def questions() -> list[Question]:
    """Return requests with small and large rows, with one row and with several."""
    rng = np.random.default_rng(1)
    result: list[Question] = []
    for rows in (1, 1, 1, 2, 7):
        x = rng.standard_normal((rows, 2)).astype(np.float32)
        result.append(Question("steady", {"x": x}, partial(_scaled, x, (2.0,))))
        # Any of the versions that were ever active may answer, but one of them for all rows.
        result.append(Question("rolled", {"x": x}, partial(_scaled, x, (2.0, 3.0))))
    large = rng.standard_normal((1, 16384)).astype(np.float32)
    result.append(Question("large", {"x": large}, partial(_scaled, large, (1.0,))))
    return result


def _scaled(x: Any, factors: tuple[float, ...], outputs: dict[str, Any]) -> bool:
    return any(np.array_equal(outputs["y"], x * np.float32(factor)) for factor in factors)


class Way(Protocol):
    """How a caller reaches the gateways."""

    def ask(self, question: Question) -> Outcome:
        """Send a request and judge its answer. Raises ConnectionError if the connection ended before it."""

    def close(self) -> None: ...


class Rest:
    """One connection over HTTP/1.1."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S_MAX)

    def ask(self, question: Question) -> Outcome:
        try:
            self._connection.request("POST", question.path, question.body, question.headers)
            reply = self._connection.getresponse()
            status, headers, body = reply.status, dict(reply.getheaders()), reply.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ConnectionError(f"{question.path}: {error!r}") from error
        if status == 200:
            return question.judged(v2.outputs(body, headers))
        if status in (429, 503) and "retry-after" in {name.lower() for name in headers}:
            return REFUSED
        return "failed", f"{question.path}: {status} {body[:200]!r}"

    def close(self) -> None:
        self._connection.close()


class Grpc:
    """One channel, which connects again by itself."""

    def __init__(self, address: str) -> None:
        # Channels of one process share their connections otherwise.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500)]
        self._channel = grpc.insecure_channel(address, options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def ask(self, question: Question) -> Outcome:
        try:
            reply = self._stub.ModelInfer(question.message, timeout=ANSWER_S_MAX)
        except grpc.RpcError as error:
            return self._refused(question, error)
        outputs = zip(reply.outputs, reply.raw_output_contents, strict=True)
        return question.judged({one.name: np.frombuffer(raw, np.float32).reshape(one.shape) for one, raw in outputs})

    @staticmethod
    def _refused(question: Question, error: Any) -> Outcome:
        code, why = error.code(), f"{question.model} over gRPC: {error.code()} {error.details()!r}"
        if any(name == "retry-after" for name, _ in error.trailing_metadata() or ()):
            return REFUSED
        if code is grpc.StatusCode.UNAVAILABLE:
            raise ConnectionError(why) from error
        return "failed", why

    def close(self) -> None:
        self._channel.close()


class Callers:
    """Sends requests from `number` threads until `stop`, half of them over gRPC.

    Attributes:
        counts: outcomes by kind.
        failures: descriptions of wrong answers and lost connections, at most 20.
    """

    def __init__(self, port: int, grpc_address: str, number: int, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.slowest_s = 0.0
        self.gateway_died = float("-inf")  # when a gateway was last killed (monotonic): its connections are cut
        self._questions = questions()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        ways = [Grpc(grpc_address) if at % 2 else Rest(port) for at in range(number)]
        self._threads = [threading.Thread(target=self._call, args=(way, seed + at)) for at, way in enumerate(ways)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _call(self, way: Way, seed: int) -> None:
        choose = random.Random(seed)
        while not self._stopping.is_set():
            question = choose.choice(self._questions)
            began = time.monotonic()
            try:
                kind, failure = way.ask(question)
            except ConnectionError as error:
                cut = began - 5 < self.gateway_died
                kind, failure = ("cut", "") if cut else ("failed", str(error))
            self._count(kind, failure, time.monotonic() - began)
            if kind in {"refused", "cut"}:  # a channel that connects again fails calls at once
                self._stopping.wait(REFUSED_S)
        way.close()

    def _count(self, kind: str, failure: str, seconds: float) -> None:
        with self._lock:
            self.counts[kind] += 1
            self.slowest_s = max(self.slowest_s, seconds)
            if failure and len(self.failures) < 20:
                self.failures.append(failure)
