"""AsyncClient: calls a Millstream server from Python, with a coroutine for each call.

async with AsyncClient() as client:
    await client.push("digits", "digits.onnx", wait_s=60)
    answer = await client.predict("digits", images)
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, overload

from millstream.client import inference, models, part_reader, races
from millstream.client.address import ServerAddress
from millstream.client.call import Call, Reply, Steps, T, listed, send
from millstream.client.documents import (
    EndpointSettings,
    ListedVersion,
    Metadata,
    Model,
    Placement,
    PoolScale,
    Race,
    Version,
    VersionStatistics,
)
from millstream.client.inference import EncodedRequest, Options, Prediction, PredictOptions, Scalar, Signatures
from millstream.client.inputs import Inputs, TableT
from millstream.client.models import Metrics, SettingsChanges
from millstream.client.retry import Budget
from millstream.client.transport import AwaitingTransport, announces, connection_to
from millstream.client.upload import ModelFiles, Progress, UploadOptions, push

TIMEOUT_S = 60.0
WAIT_S = 300.0
LOAD_S_MAX = 900.0
RETRIES = 4

PathLike = str | os.PathLike[str]


class AsyncClient:
    """A client of one server. Close it, or use it in an `async with` block. Tasks of one event loop may share it.

    Every error is a `Failure` with one clear line: ServerError (and ModelNotFound), ConnectionFailed, Timeout,
    VersionFailed, WrongFile, or a plain Failure for a mistake that is found before anything is sent.

    Args:
        endpoint: URL, or name of an endpoint in ~/.config/millstream/config.toml. None: MILLSTREAM_ENDPOINT, the
            installation that runs in this folder, the default of config.toml, or http://127.0.0.1:8000.
        key: of the admin API. None: that of the named endpoint, or MILLSTREAM_ADMIN_KEY.
        timeout: seconds that a method may take with all its repeated calls, unless it says otherwise.
        retries: how often a call is repeated that is safe to repeat: refused connections, 429 and 503 with
            Retry-After, connections that ended before the reply to a call that changes nothing.
        ca_file: certificates to trust instead of the system's. None: that of the named endpoint, or MILLSTREAM_CA_FILE.
            A server that asks for a certificate gets that in MILLSTREAM_CLIENT_CERT_FILE and
            MILLSTREAM_CLIENT_KEY_FILE.
    """

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
        """Close the connections."""
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
        """Return the outputs of a model: numpy arrays by name, a DataFrame for a DataFrame, records for records.

        Args:
            model: its name.
            inputs: a DataFrame; records (a list of dicts); a dict of columns or of arrays by input name; for a model
                with one input also an array or list, texts, or images (of Pillow, bytes, paths). Values are converted
                to the input's datatype if it can represent them; a single row may omit its first dimension. Which
                models take which of these, and what comes back: docs/client.md.
            version: None: the version that serves.
            outputs: names of the outputs to return; None: all.
            request_id: named in the server's logs and in the reply; None: the server makes one.
            parameters: parameters of the request, such as {"priority": 1}.
            timeout: seconds; the server also stops working on the request then. None: the client's.
        """
        budget = self._budget(timeout)
        options = Options(version, outputs, request_id, parameters, announces())
        return await self._transport.run(inference.predict(model, inputs, options, self._signatures, budget), budget)

    async def stream(
        self,
        model: str,
        inputs: Any,
        *,
        version: int | None = None,
        request_id: str | None = None,
        parameters: Mapping[str, Scalar] | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Prediction]:
        """Yield the parts of a model's answer as they come: outputs by name, as `predict` returns them.

        Of a model that answers at once, the answer is the only part. Close the iterator to end the run early.

        Args:
            model: its name.
            inputs: as of `predict`, without tables.
            version: None: the version that serves.
            request_id: in the reply's events; None: the server makes one.
            parameters: parameters of the request, such as {"timeout": 5_000_000}.
            timeout: longest silence of the server in seconds; None: any.
        """
        options = Options(version, None, request_id, parameters)
        call, reader = await self._run(part_reader.stream(model, inputs, options, self._signatures))
        async for line in self._transport.lines(call, timeout):
            part = reader.read(line)
            if part is not None:
                yield part

    async def infer(self, model: str, request: EncodedRequest, *, version: int | None = None) -> Reply:
        """Send an inference request that is already encoded, and return the reply as it is."""
        return await self._run(inference.infer(model, version, request))

    async def predict_json(
        self, model: str, request: Mapping[str, Any], *, version: int | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """Send a request document of the Open Inference Protocol, {"inputs": [...]}, and return the reply's."""
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
        """Upload a file or folder as a new version, and return its document when the server has checked it.

        Of a folder only what belongs to its model is sent, and of an ONNX file also the files of its weights. A version
        with the same bytes and configuration stands for the upload; its document says `existing` then.
        An upload may take any time, but Timeout is raised if the server is silent for too long.

        Args:
            model: its name; a new one makes a new model.
            path: model file, archive or folder: ONNX with its external data, or a framework's model, which is imported.
            version: number of the new version; None: the next.
            config: of the version, such as {"rows_max": 32, "pools": ["cpu"]}.
            activate: whether it serves in place of the current version when it is ready.
            wait_s: longest wait until it is ready, in seconds; the document's `state` says whether it is.
            allow_pickle: load a pickle, which can execute code: classes of a list alone, in the server's sandbox.
            allow_code: run code that a model's folder brings with it, in the server's sandbox.
            inputs: that the file does not describe, as TorchScript does not: "x:FP32:-1,3,224,224".
            progress: called with the bytes sent so far and the bytes of the upload.

        Raises:
            VersionFailed: it cannot be loaded.
        """
        files = await asyncio.to_thread(ModelFiles.open, Path(path), config)
        options = UploadOptions(version, config, activate, wait_s, allow_pickle, allow_code, tuple(listed(inputs)))
        steps = push(model, files, options, progress, time.monotonic)
        return await self._transport.run(steps, Budget(None, time.monotonic))

    async def wait(self, model: str, version: int | None = None, *, timeout: float = WAIT_S) -> Version:
        """Wait until a version is ready, and return its document; version None: the active one.

        Raises VersionFailed with the server's reason, and Timeout.
        """
        budget = self._budget(timeout)
        return await self._transport.run(models.wait(model, version, budget), budget)

    async def activate(self, model: str, version: int) -> Model:
        """Serve this version in place of the current one, which answers until this one is ready."""
        return await self._run(models.activate(model, version))

    async def remove(self, model: str, version: int | None = None, *, force: bool = False) -> None:
        """Delete a model, or one version; `force`: also the version that serves."""
        await self._run(models.remove(model, version, force=force))

    async def load(
        self,
        model: str,
        *,
        config: str | dict[str, Any] | None = None,
        retry: bool = True,
        timeout: float = LOAD_S_MAX,
    ) -> list[int]:
        """Serve a model that was unloaded, or reload one of a Triton repository; return its versions when they serve.

        Args:
            model: its name.
            config: Triton model configuration, such as {"max_batch_size": 8}.
            retry: also try versions again that failed because they ended processes or took too long.
            timeout: seconds.
        """
        return await self._run(models.load(model, config, retry=retry), timeout)

    async def unload(self, model: str) -> None:
        """Stop serving a model until it is loaded again."""
        await self._run(models.unload(model))

    async def models(self, *, owner: str | None = None, labels: Mapping[str, str] | None = None) -> list[Model]:
        """Return all models with their versions, or those that an API key of this name owns, or with these labels."""
        return await self._run(models.models(owner, labels))

    async def model(self, model: str) -> Model:
        """Return one model with its versions. Raises ModelNotFound."""
        return await self._run(models.model(model))

    async def versions(self, model: str) -> list[ListedVersion]:
        """Return the versions of a model, the oldest first. Raises ModelNotFound."""
        return await self._run(models.versions(model))

    async def version(self, model: str, version: int) -> Version:
        """Return one version. Raises ModelNotFound."""
        return await self._run(models.version(model, version))

    async def metadata(self, model: str, version: int | None = None) -> Metadata:
        """Return the inputs and outputs of a model's serving version, or of another one. Raises ModelNotFound."""
        return await self._run(models.metadata(model, version))

    async def live(self) -> bool:
        """Return whether the server's process answers. Raises ConnectionFailed, Timeout."""
        return await self._run(models.live())

    async def ready(self, model: str | None = None, version: int | None = None) -> bool:
        """Return whether the server, a model or a version answers inference requests."""
        return await self._run(models.ready(model, version))

    async def load_s(self, model: str, version: int | None = None) -> float:
        """Return the predicted seconds that a request would wait for the load of the model; 0: it is loaded."""
        return await self._run(models.load_s(model, version))

    async def server_version(self) -> str:
        """Return the server's version of Millstream."""
        return await self._run(models.server_version())

    async def keys(
        self, action: str, name: str | None = None, document: Mapping[str, Any] | None = None, *, forget: bool = False
    ) -> dict[str, Any]:
        """Create, list, rotate or revoke API keys; return the key, or all keys.

        Args:
            action: create, list, rotate or revoke.
            name: of the key, or its id; not for create and list.
            document: of the new key or of the rotation, as in the admin API.
            forget: with revoke: remove the document of a key that has ended.
        """
        return await self._run(models.manage_keys(action, name, document or {}, forget=forget))

    async def audit(
        self,
        limit: int = 100,
        *,
        key: str | None = None,
        model: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> list[dict[str, Any]]:
        """Return the newest entries of the audit log, the newest last.

        Args:
            limit: how many at most.
            key: id or name of the key that made the calls.
            model: name of the model, with * and ? for any characters.
            since: seconds since the epoch.
            until: the same; not included.
        """
        return await self._run(models.audit(limit, key=key, model=model, since=since, until=until))

    async def pools(self) -> list[dict[str, Any]]:
        """Return the pools of workers."""
        return await self._run(models.pools())

    async def workers(self) -> list[dict[str, Any]]:
        """Return the workers, and the versions in each."""
        return await self._run(models.workers())

    async def placement(self, model: str | None = None) -> Placement:
        """Return which worker holds which version, and why; of one model, or all. Raises ModelNotFound."""
        return await self._run(models.placement(model))

    async def scale(self) -> list[PoolScale]:
        """Return how many workers each pool should have, and why, by the last decisions of the controller."""
        return await self._run(models.scale())

    async def pool_scale(self, pool: str) -> PoolScale:
        """Return how many workers a pool should have. Raises ServerError: no such pool, or no controller decides."""
        return await self._run(models.pool_scale(pool))

    async def begin_race(
        self,
        model: str,
        version: int,
        *,
        targets: Sequence[str] = (),
        pool: str | None = None,
        accept_random_samples: bool = False,
        gate: Mapping[str, float | str] | None = None,
    ) -> Race:
        """Ask for a race of compiled forms of a version; one that waits or runs is returned as it is.

        Args:
            model: name of the model.
            version: number of the version.
            targets: names of targets, or candidates of a report, that take part; (): all.
            pool: whose worker runs it; None: the first that has the version.
            accept_random_samples: whether lossy candidates take part without real samples.
            gate: what answers must agree in: `cosine_min`, `agreement_min`.
        """
        steps = races.begin(model, version, targets, pool, gate, accept_random_samples=accept_random_samples)
        return await self._run(steps)

    async def race(self, model: str, version: int, *, pool: str | None = None) -> Race:
        """Return the race of a version, with its report."""
        return await self._run(races.race(model, version, pool))

    async def wait_race(self, model: str, version: int, *, pool: str | None = None, timeout_s: float = WAIT_S) -> Race:
        """Wait until the race of a version is over, and return it. Raises Timeout."""
        return await self._run(races.wait(model, version, pool), timeout_s)

    async def cancel_race(self, model: str, version: int, *, pool: str | None = None) -> Race:
        """Cancel the race of a version that waits or runs."""
        return await self._run(races.cancel(model, version, pool))

    async def undo_race(self, model: str, version: int, *, pool: str | None = None) -> Race:
        """Serve a version by its own file again, after a compiled form won a race."""
        return await self._run(races.undo(model, version, pool))

    async def put_race_samples(self, model: str, version: int, content: bytes) -> dict[str, list[int]]:
        """Upload an .npz file of inputs for the races of a version; return the shapes of its arrays."""
        return await self._run(races.put_samples(model, version, content))

    async def statistics(self) -> list[VersionStatistics]:
        """Return what each loaded version has run, over all gateways (Triton's statistics)."""
        return await self._run(models.statistics())

    async def settings(self, model: str) -> EndpointSettings:
        """Return where and how often a model is loaded. Raises ModelNotFound."""
        return await self._run(models.settings(model))

    async def configure(self, model: str, **settings: Unpack[SettingsChanges]) -> EndpointSettings:
        """Change where and how often a model is loaded, and whose it is.

        Args:
            model: its name.
            settings: what changes; None leaves a setting as it is.

        Returns the settings, with warnings about what keeps them from having an effect now.
        """
        return await self._run(models.configure(model, settings))

    async def metrics(self) -> Metrics:
        """Return the server's metrics."""
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
        """Send any other request, and return the reply. Raises ServerError for a status that is not 2xx."""
        call = Call(method, path, query or {}, headers or {}, content, repeatable=method == "GET")
        return await self._run(send(call), timeout)

    async def _run(self, steps: Steps[T], timeout: float | None = None) -> T:
        return await self._transport.run(steps, self._budget(timeout))

    def _budget(self, timeout: float | None) -> Budget:
        return Budget(self.timeout if timeout is None else timeout, time.monotonic)
