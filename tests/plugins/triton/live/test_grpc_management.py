"""The calls of Triton's extensions over small implementations of their interfaces: what goes in, what comes out, who
may.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from millstream.gateway.connection.drain import Drain
from millstream.gateway.grpc.server import GrpcServer
from millstream.gateway.http.deps import Deps
from millstream.plugins.compat.triton.gateway import Triton
from millstream.plugins.compat.triton.loader import IndexEntry
from millstream.plugins.compat.triton.schemas import Statistics
from millstream.plugins.compat.triton.shared_memory import Region
from millstream.services.errors import Code, Failure, invalid, not_found
from tests.kit.application import OPERATOR, Application

KEY = {"authorization": "Bearer secret"}


class Numbers:
    """Statistics of one model."""

    async def of(self, model: str | None, version: str | None) -> Statistics:
        if model not in {None, "m"}:
            raise invalid(f"requested model '{model}' is not available")
        parts: Any = {
            f"compute_{part}": {"count": 1, "ns": ns} for part, ns in (("input", 10), ("infer", 20), ("output", 30))
        }
        one: Any = {
            "name": "m",
            "version": version or "1",
            "last_inference": 1234,
            "inference_count": 9,
            "execution_count": 2,
            "inference_stats": {"success": {"count": 2, "ns": 99}},
            "response_stats": {},
            "batch_stats": [{"batch_size": 8, **parts}],
            "memory_usage": [{"type": "GPU", "id": 1, "byte_size": 5}],
        }
        return {"model_stats": [one]}


class Repository:
    """What was asked of it, and an index of two."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def index(self, *, ready: bool) -> list[IndexEntry]:
        entries = [IndexEntry("m", "1", "READY"), IndexEntry("n", "1", "UNAVAILABLE", "unloaded")]
        return entries[:1] if ready else entries

    async def load(self, model: str, config: str | None, files: Mapping[str, bytes]) -> None:
        self.asked.append(("load", model, config, dict(files)))
        if model == "nope":
            raise not_found("failed to load 'nope', failed to poll from model repository")

    async def unload(self, model: str) -> None:
        self.asked.append(("unload", model))


class Extensions(Triton):
    """With the configuration of one model."""

    def config_of(self, model: str, version: str | None) -> dict[str, Any]:
        if model != "m":
            raise not_found(f"Request for unknown model: '{model}' is not found")
        return {
            "name": "m",
            "max_batch_size": 8,
            "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 2]}],
            "dynamic_batching": {"max_queue_delay_microseconds": 5_000_000_000},
            "known_to_later_versions": True,
        }


class Regions:
    """Registered regions."""

    def __init__(self) -> None:
        self.known: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        if name in self.known:
            raise Failure(Code.CONFLICT, f"shared memory region '{name}' already in manager")
        self.known[name] = Region(name, key, offset, size_bytes)

    def unregister(self, name: str | None) -> None:
        if name is None:
            self.known.clear()
        else:
            self.known.pop(name, None)

    def regions(self, name: str | None) -> list[Region]:
        if name is not None and name not in self.known:
            raise not_found(f"Unable to find system shared memory region: '{name}'")
        return [region for region in self.known.values() if name in {None, region.name}]

    def view(self, name: str, offset: int, size_bytes: int) -> memoryview:
        return memoryview(bytearray(size_bytes))


class Trace:
    """Global settings alone."""

    def __init__(self) -> None:
        self.values: dict[str, str | list[str]] = {"trace_level": ["OFF"], "trace_rate": "1000"}

    def get(self, model: str | None) -> dict[str, str | list[str]]:
        if model is not None:
            raise invalid(f"Request for unknown model : {model}")
        return self.values

    def update(self, model: str | None, values: Mapping[str, Any]) -> dict[str, str | list[str]]:
        for name, value in values.items():
            self.values[name] = "1000" if value is None else value
        return self.values


class Log:
    """Three settings, one of each type."""

    def __init__(self) -> None:
        self.values: dict[str, str | int | bool] = {"log_info": True, "log_verbose_level": 0, "log_format": "default"}

    def get(self) -> dict[str, str | int | bool]:
        return self.values

    def update(self, values: Mapping[str, Any]) -> dict[str, str | int | bool]:
        if "log_file" in values:
            raise Failure(Code.UNSUPPORTED, "log file location can not be updated through network protocol")
        self.values |= values
        return self.values


@asynccontextmanager
async def serving(tmp_path: Path, parts: Mapping[str, Any], **settings: object) -> AsyncIterator[str]:
    application = Application(tmp_path, grpc_port=0, **settings)
    deps: Deps = application.app.state.deps
    made = Extensions(deps.catalog, *parts.values())
    deps = replace(deps, parts=(made,))
    server = GrpcServer(deps, Drain(), shared=False)
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.close()


def extensions() -> dict[str, Any]:
    return {
        "loader": Repository(),
        "statistics": Numbers(),
        "memory": Regions(),
        "traces": Trace(),
        "logs": Log(),
    }


async def refused(call: Awaitable[Any], status: str, text: str) -> None:
    with pytest.raises((InferenceServerException, grpc.aio.AioRpcError)) as caught:
        await call
    assert status in str(caught.value)
    assert text in str(caught.value)


def with_client(tmp_path: Path, use: Callable[[Any, dict[str, Any]], Awaitable[None]], **settings: object) -> None:
    parts = extensions()
    settings = settings or {"open_control": True}

    async def run() -> None:
        async with serving(tmp_path, parts, **settings) as target, triton.InferenceServerClient(target) as client:
            await use(client, parts)

    asyncio.run(run())


def test_configuration_and_statistics(tmp_path: Path) -> None:
    async def use(client: Any, _: dict[str, Any]) -> None:
        config = (await client.get_model_config("m")).config
        assert (config.max_batch_size, config.input[0].dims[:]) == (8, [-1, 2])
        assert config.dynamic_batching.max_queue_delay_microseconds == 5_000_000_000
        await refused(client.get_model_config("n"), "NOT_FOUND", "unknown model: 'n'")
        for model in ("m", ""):
            (stats,) = (await client.get_inference_statistics(model)).model_stats
            assert (stats.name, stats.version, stats.last_inference, stats.inference_count) == ("m", "1", 1234, 9)
            assert (stats.execution_count, stats.inference_stats.success.ns) == (2, 99)
            assert stats.inference_stats.fail.count == 0
            assert (stats.batch_stats[0].batch_size, stats.batch_stats[0].compute_output.ns) == (8, 30)
            assert (stats.memory_usage[0].type, stats.memory_usage[0].id, stats.memory_usage[0].byte_size) == (
                "GPU",
                1,
                5,
            )
        await refused(client.get_inference_statistics("n"), "INVALID_ARGUMENT", "requested model 'n'")
        await refused(client.get_inference_statistics("m", "x"), "INVALID_ARGUMENT", "integral value")

    with_client(tmp_path, use)


def test_repository(tmp_path: Path) -> None:
    async def use(client: Any, parts: dict[str, Any]) -> None:
        index = (await client.get_model_repository_index()).models
        assert [(one.name, one.version, one.state, one.reason) for one in index] == [
            ("m", "1", "READY", ""),
            ("n", "1", "UNAVAILABLE", "unloaded"),
        ]
        await client.load_model("m")
        await client.load_model("m", config='{"backend": "x"}', files={"file:1/model.onnx": b"\0\1"})
        await client.unload_model("m", unload_dependents=True)
        assert parts["loader"].asked == [
            ("load", "m", None, {}),
            ("load", "m", '{"backend": "x"}', {"1/model.onnx": b"\0\1"}),
            ("unload", "m"),
        ]
        await refused(client.load_model("nope"), "INTERNAL", "failed to load 'nope'")
        stub = client._client_stub
        assert [one.name for one in (await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))).models] == ["m"]
        unsupported = "'repository_name' specification is not supported"
        for call, kind in (
            (stub.RepositoryIndex, pb.RepositoryIndexRequest),
            (stub.RepositoryModelLoad, pb.RepositoryModelLoadRequest),
            (stub.RepositoryModelUnload, pb.RepositoryModelUnloadRequest),
        ):
            await refused(call(kind(repository_name="r")), "UNIMPLEMENTED", unsupported)
        odd = pb.RepositoryModelLoadRequest(model_name="m")
        odd.parameters["config"].int64_param = 1
        await refused(stub.RepositoryModelLoad(odd), "INVALID_ARGUMENT", "'config' parameter, expected string_param.")
        odd = pb.RepositoryModelLoadRequest(model_name="m")
        odd.parameters["file:1/x"].bytes_param = b"1"
        await refused(stub.RepositoryModelLoad(odd), "INVALID_ARGUMENT", "together with the parameter 'config'")
        odd = pb.RepositoryModelLoadRequest(model_name="m")
        odd.parameters["other"].bool_param = True
        await refused(stub.RepositoryModelLoad(odd), "INVALID_ARGUMENT", "unrecognized load parameter 'other'")

    with_client(tmp_path, use)


def test_shared_memory(tmp_path: Path) -> None:
    async def use(client: Any, parts: dict[str, Any]) -> None:
        await client.register_system_shared_memory("r", "/key", 64, offset=8)
        assert parts["memory"].known == {"r": Region("r", "/key", 8, 64)}
        status = (await client.get_system_shared_memory_status()).regions["r"]
        assert (status.name, status.key, status.offset, status.byte_size) == ("r", "/key", 8, 64)
        await refused(client.register_system_shared_memory("r", "/key", 64), "ALREADY_EXISTS", "already in manager")
        await refused(client.get_system_shared_memory_status("q"), "NOT_FOUND", "Unable to find system shared")
        await client.unregister_system_shared_memory("r")
        await client.unregister_system_shared_memory()
        assert parts["memory"].known == {}
        assert not (await client.get_cuda_shared_memory_status()).regions
        await refused(client.get_cuda_shared_memory_status("q"), "NOT_FOUND", "Unable to find cuda shared memory")
        await refused(
            client.register_cuda_shared_memory("g", b"aGFuZGxl", 0, 8), "INVALID_ARGUMENT", "'g', GPUs not supported"
        )
        await client.unregister_cuda_shared_memory()

    with_client(tmp_path, use)


def test_trace_and_log_settings(tmp_path: Path) -> None:
    async def use(client: Any, _: dict[str, Any]) -> None:
        found = await client.update_trace_settings(
            settings={"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "5"}
        )
        assert found.settings["trace_level"].value[:] == ["TIMESTAMPS", "TENSORS"]
        assert found.settings["trace_rate"].value[:] == ["5"]
        cleared = await client.update_trace_settings(settings={"trace_rate": None})
        assert cleared.settings["trace_rate"].value[:] == ["1000"]
        assert (await client.get_trace_settings()).settings["trace_level"].value[:] == ["TIMESTAMPS", "TENSORS"]
        await refused(client.get_trace_settings("n"), "INVALID_ARGUMENT", "unknown model : n")
        updated = await client.update_log_settings({"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"})
        for settings in (updated.settings, (await client.get_log_settings()).settings):
            assert settings["log_info"].bool_param is False
            assert settings["log_verbose_level"].uint32_param == 2
            assert settings["log_format"].string_param == "ISO8601"
        await refused(client.update_log_settings({"log_file": "x"}), "UNIMPLEMENTED", "can not be updated")

    with_client(tmp_path, use)


def changes(client: Any, headers: Any) -> list[Awaitable[Any]]:
    """All that changes something."""
    return [
        client.load_model("m", headers=headers),
        client.unload_model("m", headers=headers),
        client.register_system_shared_memory("r", "/key", 64, headers=headers),
        client.unregister_system_shared_memory(headers=headers),
        client.get_system_shared_memory_status(headers=headers),
        client.unregister_cuda_shared_memory(headers=headers),
        client.update_trace_settings(settings={"trace_rate": "5"}, headers=headers),
        client.update_log_settings({"log_info": False}, headers=headers),
    ]


@pytest.mark.parametrize("settings", [{"admin_key": "secret"}, {"http_port": 8000}], ids=["admin key", "without a key"])
def test_changes_need_a_key_or_the_token(tmp_path: Path, settings: dict[str, object]) -> None:
    async def use(client: Any, parts: dict[str, Any]) -> None:
        for call in changes(client, None):
            await refused(call, "UNAUTHENTICATED", "send a key")
        for call in changes(client, {"authorization": "Bearer other"}):
            await refused(call, "UNAUTHENTICATED", "this is not a key")
        assert parts["loader"].asked == []
        for call in changes(client, KEY if "admin_key" in settings else OPERATOR):
            await call
        assert len(parts["loader"].asked) == 2
        # what only looks needs none
        await client.get_model_repository_index()
        await client.get_trace_settings()
        await client.get_log_settings()

    with_client(tmp_path, use, **settings)


def test_a_port_that_is_taken_is_one_clear_line(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, extensions()) as target:
            port = int(target.rpartition(":")[2])
            application = Application(tmp_path / "other", grpc_port=port)
            server = GrpcServer(application.app.state.deps, Drain(), shared=False)
            with pytest.raises(Failure, match=f"port {port}: it is in use"):
                await server.start()
            await server.close()

    asyncio.run(run())
