"""A thousand idle connections, slow bodies and slow readers: they hold no permit, disturb no other client, and are cut
off in time.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from tests.kit import models, v2
from tests.kit.load import constant_load
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until
from tests.kit.wire import Wire, post, request

IDLE = 1000
SLOW_BODIES = 40
SLOW_READERS = 16
CALLERS = 3
INFLIGHT_MAX = 8  # permits: fewer than there are slow clients of any kind
LIMIT_S = 40  # of each kind of slowness: long enough to look at all of them while they last
CUT_S_MAX = 300.0  # from the first connection until the last is cut off, on a machine that is busy with something else
FILES = 4096
SOFT_FILES = 256  # as if started in a shell with a low limit
X = np.array([[1, 2], [3, 4]], np.float32)
BODIES = [
    v2.request({"x": X * i}, binary=bool(i % 2), binary_outputs=bool(i % 2), parameters=v2.PATIENT) for i in range(1, 9)
]
LARGE = np.zeros((1, 2 << 20), np.float32)  # 8 MiB: more than the sockets between two processes hold
LIVE = request("GET", "/v2/health/live")
TRICKLE_S = 0.25


@contextmanager
def files(soft: int) -> Iterator[None]:
    """Another soft limit on open files meanwhile, for this process and those that it starts."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < soft:
        pytest.fail(f"this test needs {soft} open files and the hard limit is {hard}: raise it (ulimit -Hn {soft})")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def descriptors(stack: Stack) -> int:
    return len(list(Path(f"/proc/{stack.pids()['gateway-0']}/fd").iterdir()))


def in_flight(stack: Stack) -> float:
    return stack.metrics().value("millstream_requests_in_flight")


async def opened(port: int, index: int) -> Wire:
    """An idle connection; every tenth one has been used."""
    wire = await Wire.connect(port)
    if index % 10 == 0:
        await wire.send(LIVE)
        assert (await wire.reply()).status == 200
    return wire


async def reads_nothing(port: int) -> Wire:
    """The sender of a large request, once its reply has begun to come: it was answered, and the answer is not read."""
    body, headers = v2.request({"x": LARGE}, parameters=v2.PATIENT)
    wire = await Wire.connect(port, receive_bytes=65536)
    await wire.send(post("/v2/models/large/infer", body, *(f"{name}: {value}" for name, value in headers.items())))
    await arrived(wire._sock)
    return wire


async def arrived(sock: socket.socket) -> None:
    """Wait for a first byte, and leave it where it is."""
    async with asyncio.timeout(CUT_S_MAX):
        while True:
            with suppress(BlockingIOError):
                assert sock.recv(1, socket.MSG_PEEK)
                return
            await asyncio.sleep(0.01)


async def trickle(wire: Wire) -> None:
    """Send a byte now and then, until the connection is gone."""
    with suppress(OSError):
        while True:
            await wire.send(b"x")
            await asyncio.sleep(TRICKLE_S)


async def sip(wire: Wire) -> None:
    """Read a byte now and then, until the connection is reset."""
    with suppress(ConnectionResetError):
        while wire._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            assert wire._sock.recv(1)
            await asyncio.sleep(TRICKLE_S)


async def timed(began: float, over: Awaitable[object]) -> float:
    """Seconds from `began` until it is over."""
    await over
    return time.monotonic() - began


async def besiege(stack: Stack, while_they_last: Callable[[], None]) -> dict[str, Sequence[float]]:
    """Open all of them, call back, and wait until the gateway has cut off each; after how many seconds, by kind."""
    began = time.monotonic()
    idle = [await opened(stack.port, index) for index in range(IDLE)]
    readers = [await reads_nothing(stack.port) for _ in range(SLOW_READERS)]
    bodies = [await Wire.connect(stack.port) for _ in range(SLOW_BODIES)]
    for wire in bodies:
        await wire.send(post("/v2/models/small/infer", b"x" * 1000)[:-999])
    kinds = {
        "idle": [asyncio.create_task(timed(began, wire.rest())) for wire in idle],
        "slow bodies": [asyncio.create_task(timed(began, trickle(wire))) for wire in bodies],
        "slow readers": [asyncio.create_task(timed(began, sip(wire))) for wire in readers],
    }
    try:
        await asyncio.to_thread(while_they_last)
        await asyncio.wait([task for tasks in kinds.values() for task in tasks], timeout=CUT_S_MAX)
        left = {kind: sum(not task.done() for task in tasks) for kind, tasks in kinds.items()}
        assert not any(left.values()), left
        return {kind: [task.result() for task in tasks] for kind, tasks in kinds.items()}
    finally:
        for task in (task for tasks in kinds.values() for task in tasks):
            task.cancel()
        for wire in (*idle, *readers, *bodies):
            wire.close()


def test_slow_clients_disturb_nobody_and_are_cut_off(tmp_path: Path) -> None:
    settings = {"http_keep_alive_s": LIMIT_S, "client_stall_s_max": LIMIT_S, "inflight_requests_max": INFLIGHT_MAX}
    small = {"small": models.scale(tmp_path / "small.onnx")}
    large = models.identity(tmp_path / "large.onnx", "FP32", ("N", LARGE.shape[1]))
    flying: list[float] = []
    # started with the limit of some shells, which a gateway raises for itself
    with files(SOFT_FILES), running_stack(tmp_path, settings=settings, models=small) as stack, files(FILES):
        stack.push("large", large, config='{"rows_max": 1}')
        quiet = descriptors(stack)

        def look() -> None:
            wait_until(lambda: descriptors(stack) > IDLE + SLOW_BODIES + SLOW_READERS, what="all of them are connected")
            load.more(100)
            flying.extend(in_flight(stack) for _ in range(5))

        with constant_load(stack.port, "/v2/models/small/infer", BODIES, CALLERS) as load:
            load.more(20)
            cut = asyncio.run(besiege(stack, look))
            load.more(20)
        wait_until(lambda: descriptors(stack) <= quiet + 1, what="their descriptors are given back")
    for kind, seconds in cut.items():
        print(f"{kind}: {len(seconds)}, cut off after {min(seconds):.1f} to {max(seconds):.1f} s")
        assert min(seconds) >= 0.9 * LIMIT_S
    print(f"{len(load.answers)} answers meanwhile; in flight: {flying}")
    for answer in load.answers:
        assert answer.status == 200, answer.body
        got = v2.outputs(answer.body, answer.headers)["y"].astype(np.float32)
        np.testing.assert_array_equal(got, X * np.float32((answer.sent + 1) * 2))
    assert max(flying) <= CALLERS + 2  # the callers', and a readiness probe of each model


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="model"; filename="m.onnx"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n"
)
FORM_HEADER = "Content-Type: multipart/form-data; boundary=b"
CHUNKED = "Transfer-Encoding: chunked"
UPLOADS_MAX = 8
KEY = "Authorization: Bearer key"
SOON_S = 2
UPLOAD_S = 30  # long enough to see that all places are taken
#: what is sent at once, of requests whose rest never comes
STUCK = {
    "upload": request("PUT", "/admin/v1/models/new/versions/1", KEY, "Content-Length: 1000000"),
    "upload of the next version": request("POST", "/admin/v1/models/new/versions", KEY, "Content-Length: 1000000"),
    "upload in chunks": request("PUT", "/admin/v1/models/new/versions/2", KEY, CHUNKED) + b"f4240\r\n",
    "form": request("PUT", "/admin/v1/models/new/versions/3", KEY, "Content-Length: 1000000", FORM_HEADER) + FORM,
    "form's head": request("PUT", "/admin/v1/models/new/versions/4", KEY, "Content-Length: 1000000", FORM_HEADER)
    + FORM[:30],
    "admin document": request("POST", "/v2/repository/models/new/load", KEY, "Content-Length: 100000"),
    "log settings": request("POST", "/v2/logging", KEY, "Content-Length: 1000"),
    "infer": request("POST", "/v2/models/small/infer", "Content-Length: 100000"),
    "infer in chunks": request("POST", "/v2/models/small/infer", CHUNKED) + b"f4240\r\n",
    "predict": request("POST", "/v1/models/small:predict", "Content-Length: 100000"),
    "generate": request("POST", "/v2/models/small/generate", "Content-Length: 100000"),
    "invocations": request("POST", "/invocations", "Content-Length: 100000"),
    "predictions": request("POST", "/predictions/small", "Content-Length: 100000"),
    "embeddings": request("POST", "/v1/embeddings", "Content-Length: 100000"),
    "a path that is not there": request("POST", "/nowhere", "Content-Length: 100000"),
    "head": b"POST /v2/models/small/infer HTTP/1.1\r\nX: ",
    "no body expected": request("GET", "/v2/health/live", "Content-Length: 100000"),
}


async def stuck(port: int, begin: bytes) -> list[int]:
    """Send `begin` and then bytes that never make a whole request; the statuses of the replies, until it is cut off."""
    async with await Wire.connect(port) as wire:
        await wire.send(begin)
        async with asyncio.timeout(CUT_S_MAX):
            trickling = asyncio.create_task(trickle(wire))
            try:
                said = await wire.rest()
            finally:
                trickling.cancel()
                await asyncio.gather(trickling, return_exceptions=True)
    return [int(line.split()[1]) for line in said.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


def test_whoever_trickles_into_any_route_is_refused(tmp_path: Path) -> None:
    """None idles, so that a limit on idle connections alone would keep them for ever."""
    settings = {"http_keep_alive_s": 600, "client_stall_s_max": SOON_S, "admin_key": "key"}
    small = {"small": models.scale(tmp_path / "small.onnx")}

    async def all_of_them(port: int) -> list[list[int]]:
        return await asyncio.gather(*(stuck(port, begin) for begin in STUCK.values()))

    with running_stack(tmp_path, settings=settings, models=small) as stack:
        answered = dict(zip(STUCK, asyncio.run(all_of_them(stack.port)), strict=True))
        # Some are answered before their body has come, and cut off as well.
        early = {"a path that is not there": [404], "no body expected": [200]}
        assert answered == {name: early.get(name, [408]) for name in STUCK}


def test_uploads_that_trickle_give_their_places_back(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "small.onnx")

    async def uploads(port: int, while_they_last: Callable[[], None]) -> None:
        async with AsyncExitStack() as stack:
            wires = [await stack.enter_async_context(await Wire.connect(port)) for _ in range(UPLOADS_MAX)]
            for index, wire in enumerate(wires):
                where = f"/admin/v1/models/m{index}/versions/1"
                await wire.send(request("PUT", where, KEY, "Content-Length: 1000000"), b"x")
            trickling = [asyncio.create_task(trickle(wire)) for wire in wires]
            await asyncio.to_thread(while_they_last)
            await asyncio.gather(*(wire.rest() for wire in wires), *trickling)

    with running_stack(
        tmp_path, settings={"http_keep_alive_s": 600, "client_stall_s_max": UPLOAD_S, "admin_key": "key"}
    ) as stack:

        def names() -> list[str]:
            return [model["name"] for model in stack.http.get("/admin/v1/models").json()["models"]]

        def refused() -> None:
            wait_until(lambda: len(names()) == UPLOADS_MAX, what="all places are taken")
            reply = stack.http.put("/admin/v1/models/good/versions/1", content=path.read_bytes())
            assert reply.status_code == 503, reply.text

        asyncio.run(uploads(stack.port, refused))
        stack.push("good", path)
        assert names() == ["good"]
