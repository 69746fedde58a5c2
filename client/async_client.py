"""AsyncClient: the methods of Client as coroutines, for programs with an event loop.

async with AsyncClient() as client:
    print((await client.predict("digits", images))["label"])
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, overload

from millstream.client import inference, keys, models
from millstream.client.address import ServerAddress
from millstream.client.call import Call, Reply, Steps, T, listed, send
from millstream.client.client import LOAD_S_MAX, RETRIES, TIMEOUT_S, WAIT_S, PathLike
from millstream.client.documents import (
    EndpointSettings,
    ListedVersion,
    Metadata,
    Model,
    Placement,
    PoolScale,
    Race,
    SettingsChanges,
    Version,
    VersionStatistics,
)
from millstream.client.infer_codec import EncodedRequest
from millstream.client.inference import Options, Prediction, PredictOptions, Scalar, Signatures
from millstream.client.inputs import Inputs, TableT
from millstream.client.metrics_page import Metrics
from millstream.client.retry import Budget
from millstream.client.transport import AwaitingTransport, announces, connection_to
from millstream.client.upload import ModelFiles, Progress, UploadOptions, push
from millstream.plugins.compile import client as races


class AsyncClient:
    """A client of one server for one event loop. Arguments, methods and errors are those of `Client`."""

    def __init__(
        self,
        endpoint: str | ServerAddress | None = None,
        *,
        key: str | None = None,
        timeout: float = TIMEOUT_S,
        retries: int = RETRIES,
        ca_file: PathLike | None = None,
    ) -> None:
        connection = connection_to(endpoint, key, retries, ca_file)
        self.url = connection.url
        self.timeout = timeout
        self._transport = AwaitingTransport(connection)
        self._signatures: Signatures = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.url!r})"

    async def close(self) -> None:
        await self._transport.close()

    @overload
    async def predict(
        self, model: str, inputs: list[dict[str, Any]], **options: Unpack[PredictOptions]
    ) -> list[dict[str, Any]]: ...
    @overload
    async def predict(self, model: str, inputs: TableT, **options: Unpack[PredictOptions]) -> TableT: ...
    @overload
    async def predict(self, model: str, inputs: Inputs, **options: Unpack[PredictOptions]) -> Prediction: ...
    async def predict(
        self,
        model: str,
        inputs: Any,
        *,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        request_id: str | None = None,
        parameters: Mapping[str, Scalar] | None = None,
        timeout: float | None = None,
    ) -> Any:
        budget = self._budget(timeout)
        options = Options(version, outputs, request_id, parameters, announces())
        return await self._transport.run(inference.predict(model, inputs, options, self._signatures, budget), budget)

    async def infer(self, model: str, request: EncodedRequest, *, version: int | None = None) -> Reply:
        return await self._run(inference.infer(model, version, request))

    async def predict_json(
        self, model: str, request: Mapping[str, Any], *, version: int | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        return await self._run(inference.infer_json(model, version, request), timeout)

    async def push(  # noqa: PLR0913 - an argument for each option of the API
        self,
        model: str,
        path: PathLike,
        *,
        version: int | None = None,
        config: dict[str, Any] | None = None,
        activate: bool = True,
        wait_s: float = 0,
        allow_pickle: bool = False,
        allow_code: bool = False,
        inputs: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Version:
        files = await asyncio.to_thread(ModelFiles.open, Path(path), config)
        options = UploadOptions(version, config, activate, wait_s, allow_pickle, allow_code, tuple(listed(inputs)))
        steps = push(model, files, options, progress, time.monotonic)
        return await self._transport.run(steps, Budget(None, time.monotonic))

    async def wait(self, model: str, version: int | None = None, *, timeout: float = WAIT_S) -> Version:
        budget = self._budget(timeout)
        return await self._transport.run(models.wait(model, version, budget), budget)

    async def activate(self, model: str, version: int) -> Model:
        return await self._run(models.activate(model, version))

    async def remove(self, model: str, version: int | None = None, *, force: bool = False) -> None:
        await self._run(models.remove(model, version, force=force))

    async def load(
        self,
        model: str,
        *,
        config: str | dict[str, Any] | None = None,
        retry: bool = True,
        timeout: float = LOAD_S_MAX,
    ) -> list[int]:
        return await self._run(models.load(model, config, retry=retry), timeout)

    async def unload(self, model: str) -> None:
        await self._run(models.unload(model))

    async def models(self, *, owner: str | None = None, labels: Mapping[str, str] | None = None) -> list[Model]:
        return await self._run(models.models(owner, labels))

    async def model(self, model: str) -> Model:
        return await self._run(models.model(model))

    async def versions(self, model: str) -> list[ListedVersion]:
        return await self._run(models.versions(model))

    async def version(self, model: str, version: int) -> Version:
        return await self._run(models.version(model, version))

    async def metadata(self, model: str, version: int | None = None) -> Metadata:
        return await self._run(models.metadata(model, version))

    async def live(self) -> bool:
        return await self._run(models.live())

    async def ready(self, model: str | None = None, version: int | None = None) -> bool:
        return await self._run(models.ready(model, version))

    async def load_s(self, model: str, version: int | None = None) -> float:
        return await self._run(models.load_s(model, version))

    async def server_version(self) -> str:
        return await self._run(models.server_version())

    async def keys(
        self, action: str, name: str | None = None, document: Mapping[str, Any] | None = None, *, forget: bool = False
    ) -> dict[str, Any]:
        """Do as Client.keys."""
        return await self._run(keys.manage(action, name, document or {}, forget=forget))

    async def audit(
        self,
        limit: int = 100,
        *,
        key: str | None = None,
        model: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> list[dict[str, Any]]:
        """Return the newest entries of the audit log, the newest last. Arguments as of `Client.audit`."""
        return await self._run(keys.audit(limit, key=key, model=model, since=since, until=until))

    async def pools(self) -> list[dict[str, Any]]:
        return await self._run(models.pools())

    async def workers(self) -> list[dict[str, Any]]:
        return await self._run(models.workers())

    async def placement(self, model: str | None = None) -> Placement:
        return await self._run(models.placement(model))

    async def scale(self) -> list[PoolScale]:
        return await self._run(models.scale())

    async def pool_scale(self, pool: str) -> PoolScale:
        return await self._run(models.pool_scale(pool))

    async def begin_race(
        self,
        model: str,
        version: int,
        *,
        seconds: float | None = None,
        targets: Sequence[str] = (),
        pool: str | None = None,
        accept_random_samples: bool = False,
        gate: Mapping[str, float | str] | None = None,
    ) -> Race:
        steps = races.begin(model, version, seconds, targets, pool, gate, accept_random_samples=accept_random_samples)
        return await self._run(steps)

    async def race(self, model: str, version: int, *, pool: str | None = None) -> Race:
        return await self._run(races.race(model, version, pool))

    async def wait_race(self, model: str, version: int, *, pool: str | None = None, timeout_s: float = WAIT_S) -> Race:
        return await self._run(races.wait(model, version, pool), timeout_s)

    async def cancel_race(self, model: str, version: int, *, pool: str | None = None) -> Race:
        return await self._run(races.cancel(model, version, pool))

    async def undo_race(self, model: str, version: int, *, pool: str | None = None) -> Race:
        return await self._run(races.undo(model, version, pool))

    async def put_race_samples(self, model: str, version: int, content: bytes) -> dict[str, list[int]]:
        return await self._run(races.put_samples(model, version, content))

    async def statistics(self) -> list[VersionStatistics]:
        return await self._run(models.statistics())

    async def settings(self, model: str) -> EndpointSettings:
        return await self._run(models.settings(model))

    async def configure(self, model: str, **settings: Unpack[SettingsChanges]) -> EndpointSettings:
        return await self._run(models.configure(model, settings))

    async def metrics(self) -> Metrics:
        return await self._run(models.metrics())

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes = b"",
        timeout: float | None = None,
    ) -> Reply:
        call = Call(method, path, query or {}, headers or {}, content, repeatable=method == "GET")
        return await self._run(send(call), timeout)

    async def _run(self, steps: Steps[T], timeout: float | None = None) -> T:
        return await self._transport.run(steps, self._budget(timeout))

    def _budget(self, timeout: float | None) -> Budget:
        return Budget(self.timeout if timeout is None else timeout, time.monotonic)
