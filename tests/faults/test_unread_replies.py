"""Clients that ask for much and read nothing: replies of all protocols share one budget, and its memory goes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.faults.test_grpc_half_sent import Caller, gateway, port
from tests.kit import http2, models
from tests.kit.memory import MIB, forget_peak, peak_bytes, resident_bytes
from tests.kit.metrics import Page
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.wait import wait_until
from tests.kit.wire import post

BUDGET = 24 * MIB  # three replies: a slow machine makes so many before their readers are cut off
BURST_BUDGET = 64 * MIB
REPLY = 8 * MIB
ASKED = 60
#: a batch on its way through Redis and what is made of it, beside what the allocator does not give back
SLACK = 224 * MIB
SLOW_S = 8
SMALL = 40 * MIB  # growth that is not worth giving back
WAIT_S = 120.0
#: slices of a batch that was tried again cool down for a minute, and on a busy machine any batch may be
COOLED_S = 240.0
SETTINGS: dict[str, Any] = {
    "inflight_bytes_max": BUDGET,
    "reply_bytes_max": 2 * REPLY,
    "client_stall_s_max": SLOW_S,
}


def push_spread(stack: Stack, folder: Path) -> None:
    """A model that answers one number with `REPLY` bytes."""
    stack.push("spread", models.spread(folder / "spread.onnx", columns=REPLY // 4))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("unread")
    with running_stack(folder, settings=SETTINGS, models={"small": models.scale(folder / "s.onnx")}) as stack:
        push_spread(stack, folder)
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    yield served
    assert_quiet(served)


def raw(*, binary: bool = True) -> bytes:
    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1.5]}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": binary}})
    return text.encode()


def message() -> bytes:
    built = pb.ModelInferRequest(model_name="spread", raw_input_contents=[np.float32(1.5).tobytes()])
    built.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    body: bytes = built.SerializeToString()
    return http2.prefix(len(body)) + body


def ask_http(stack: Stack, open_until: ExitStack, path: str, body: bytes, each: int) -> None:
    """Clients with `each` pipelined requests, whose replies are never read."""
    for _ in range(ASKED // each):
        client = open_until.enter_context(http2.unread(stack.port))
        client.sendall(post(path, body) * each)


def ask_grpc(stack: Stack, open_until: ExitStack, path: str, each: int) -> None:
    """A client whose windows let no reply go."""
    closed = http2.setting(http2.INITIAL_WINDOW_SIZE, 0)
    connection = open_until.enter_context(http2.Connection(port(stack), closed))
    connection.take()  # its settings came, or the windows would be those of before
    for _ in range(ASKED // each):
        stream = connection.begin(path)
        for at in range(each):
            connection.give(stream, message(), end=at + 1 == each)


INFER = "/v2/models/spread/infer"
KINDS: dict[str, Callable[[Stack, ExitStack], None]] = {
    "fast path": lambda stack, until: ask_http(stack, until, INFER, raw(), 1),
    "fast path, JSON": lambda stack, until: ask_http(stack, until, INFER, raw(binary=False), 1),
    "fast path, pipelined": lambda stack, until: ask_http(stack, until, INFER, raw(), 15),
    "routes": lambda stack, until: ask_http(stack, until, "/v2/models/spread/generate", b'{"x": 1.5}', 1),
    "routes, streamed": lambda stack, until: ask_http(
        stack, until, "/v2/models/spread/generate_stream", b'{"x": 1.5}', 1
    ),
    "gRPC": lambda stack, until: ask_grpc(stack, until, http2.INFER, 1),
    "gRPC streams": lambda stack, until: ask_grpc(stack, until, http2.STREAM_INFER, 30),
}


@pytest.mark.parametrize("kind", KINDS)
def test_unread_replies_share_one_budget(stack: Stack, kind: str) -> None:
    pid = gateway(stack)
    page = stack.metrics()
    before = resident_bytes(pid)
    forget_peak(pid)
    with ExitStack() as until, Caller(stack.grpc) as caller:
        KINDS[kind](stack, until)
        wait_until(lambda: are_held(stack, kind, page), WAIT_S, "replies are held")
        answered = caller.answered
        wait_until(lambda: caller.answered > answered + 5, what="others are answered")
        assert not caller.failed
        wait_until(
            lambda: stack.metrics().value("millstream_replies_unread_bytes") == 0, WAIT_S, "slow readers are cut off"
        )
    peak = peak_bytes(pid) - before
    print(f"{kind}: {ASKED * REPLY // MIB} MiB were asked for, {peak // MIB} MiB were held")
    assert peak < BUDGET + SLACK


def are_held(stack: Stack, kind: str, before: Page) -> bool:
    """Whether so many replies were held that others were refused; readers may be cut off before this process looks.

    Clients that pipeline have one reply at a time: all of them together may not fill the budget.
    """
    page = stack.metrics()
    if "pipelined" in kind:
        replies = {"name": "millstream_requests_total", "model": "spread", "outcome": "ok"}
        return page.value(**replies) >= before.value(**replies) + 2
    refused = {"name": "millstream_requests_refused_total", "reason": "unread_full"}
    return page.value(**refused) > before.value(**refused)


@pytest.fixture
def new_stack(tmp_path: Path) -> Iterator[Stack]:
    """A stack whose processes have not grown yet."""
    # On a busy machine slow readers are not cut off before many replies are held.
    settings = SETTINGS | {"inflight_bytes_max": BURST_BUDGET, "client_stall_s_max": WAIT_S}
    with running_stack(tmp_path, settings=settings) as stack:
        push_spread(stack, tmp_path)
        yield stack


def test_memory_goes_back_after_a_burst(new_stack: Stack) -> None:
    stack = new_stack
    assert_quiet(stack)
    processes = {name: pid for name, pid in stack.pids().items() if name in {"gateway-0", "cpu-0"}}
    before = {name: resident_bytes(pid) for name, pid in processes.items()}
    for pid in processes.values():
        forget_peak(pid)
    numbers = np.zeros(10_000_000, np.float32).tolist()
    tensor = {"name": "x", "shape": [1, len(numbers)], "datatype": "FP32", "data": numbers}
    for _ in range(2):
        assert stack.http.post("/v2/models/spread/infer", json={"inputs": [tensor]}).status_code == 400
    for _ in range(4):
        assert len(stack.http.post("/v2/models/spread/infer", content=raw()).content) > REPLY
    peaks = {name: peak_bytes(pid) - before[name] for name, pid in processes.items()}
    assert peaks["gateway-0"] > 64 * MIB
    # Slices of shared memory that the worker wrote stay mapped: on a busy machine more of them than elsewhere.
    small = {"gateway-0": SMALL, "cpu-0": 2 * SMALL}
    for name, pid in processes.items():
        wait_until_resident(stack, pid, before[name] + max(peaks[name] // 2, small[name]))


def test_memory_of_unread_grpc_replies_goes_back(new_stack: Stack) -> None:
    pid = gateway(new_stack)
    before = resident_bytes(pid)
    forget_peak(pid)
    with ExitStack() as until:
        KINDS["gRPC"](new_stack, until)
        wait_until(lambda: peak_bytes(pid) - before > 2 * SMALL, WAIT_S, "replies are held")
    wait_until_resident(new_stack, pid, before + SMALL)


def wait_until_resident(stack: Stack, pid: int, most: int) -> None:
    """Wait until no more than `most` bytes are resident; a failure names what the gateway says to hold."""
    try:
        wait_until(lambda: resident_bytes(pid) <= most, COOLED_S, "memory goes back")
    except AssertionError as error:
        page = stack.metrics()
        names = ("requests_in_flight", "requests_receiving_bytes", "replies_unread_bytes", "segment_in_use_bytes")
        held = {name: page.value(f"millstream_{name}") for name in names}
        raise AssertionError(f"{error}: {resident_bytes(pid)} of {most} bytes, {held}\n{stack.logs()}") from None
