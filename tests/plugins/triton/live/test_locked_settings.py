"""A gateway that is paused while it changes settings: calls to others wait for it, and hold nobody else up."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from millstream.plugins.compat.triton import shared_settings
from millstream.services.installation import shm_prefix
from millstream.services.settings import Settings
from tests.kit.application import Application

pytestmark = pytest.mark.anyio

TRACE, LOG, REGIONS = "run/trace-settings.lock", "run/log-settings.lock", "*.clients/regions.lock"
REGION = "/v2/systemsharedmemory/region/r"
#: lock, method, path and body of each call that changes a shared document
HTTP = [
    (TRACE, "POST", "/v2/trace/setting", {"trace_rate": "7"}),
    (LOG, "POST", "/v2/logging", {"log_verbose_level": 1}),
    (REGIONS, "POST", f"{REGION}/register", {"key": "mine", "byte_size": 10}),
    (REGIONS, "POST", "/v2/systemsharedmemory/unregister", None),
]
#: lock, method and request
GRPC = [
    (TRACE, "TraceSetting", pb.TraceSettingRequest(settings={"trace_rate": {"value": ["7"]}})),
    (LOG, "LogSettings", pb.LogSettingsRequest(settings={"log_verbose_level": {"uint32_param": 1}})),
    (REGIONS, "SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="r", key="mine", byte_size=10)),
    (REGIONS, "SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest()),
]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls wait longer than any test takes."""
    monkeypatch.setattr(shared_settings, "LOCK_S_MAX", 600.0)


@contextmanager
def locked(home: Path, lock: str) -> Iterator[None]:
    """Hold a lock, as another process would. `lock`: its path below `home`; a star is the name of the installation."""
    name = shm_prefix(Settings(home=home, installation_name="test"))
    path = home / lock.replace("*", name)
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


async def waits_for(
    home: Path, lock: str, call: Callable[[], Awaitable[Any]], other: Callable[[], Awaitable[Any]]
) -> Any:
    """Make a call while its document is locked, and `other` calls meanwhile; return its answer."""
    with locked(home, lock):
        answer = asyncio.ensure_future(call())
        for _ in range(10):
            await asyncio.sleep(0.05)
            await other()
        assert not answer.done(), answer.result()
    return await answer


def application_of(home: Path) -> Application:
    (home / "mine").write_bytes(bytes(10))
    return Application(home, grpc_port=0, shm_allow_clients=True, open_control=True)


@pytest.mark.parametrize(("lock", "method", "path", "body"), HTTP)
async def test_a_lock_that_stays_held_is_a_documented_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: str, method: str, path: str, body: object
) -> None:
    monkeypatch.setattr(shared_settings, "LOCK_S_MAX", 0.0)
    application = application_of(tmp_path)
    routes = {re.sub(r"{\w+}", "r", route): calls for route, calls in application.app.openapi()["paths"].items()}
    async with application.client() as client:
        with locked(tmp_path, lock):
            reply = await client.request(method, path, json=body)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert "503" in routes[path][method.lower()]["responses"]


@pytest.mark.parametrize(("lock", "method", "path", "body"), HTTP)
async def test_http(tmp_path: Path, lock: str, method: str, path: str, body: object) -> None:
    async with application_of(tmp_path).client() as client:
        call = lambda: client.request(method, path, json=body)  # noqa: E731
        reply = await waits_for(tmp_path, lock, call, lambda: client.get("/v2/health/live"))
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(("lock", "method", "request_"), GRPC)
async def test_grpc(tmp_path: Path, lock: str, method: str, request_: Any) -> None:
    async with application_of(tmp_path).grpc_channel() as channel:

        async def call(method: str, request: Any) -> Any:
            path = f"/inference.GRPCInferenceService/{method}"
            answer = getattr(pb, f"{method}Response").FromString
            return await channel.unary_unary(path, type(request).SerializeToString, answer)(request)

        other = lambda: call("ServerLive", pb.ServerLiveRequest())  # noqa: E731
        await waits_for(tmp_path, lock, lambda: call(method, request_), other)
