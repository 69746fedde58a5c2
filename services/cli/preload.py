"""Loads the models of `--preload` after the start, and tries one inference of each through the real path.

live -> push files that are not there yet -> wait until ready -> one inference -> /v2/health/ready
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from millstream.client.async_client import AsyncClient
from millstream.client.documents import ListedVersion
from millstream.client.errors import ModelNotFound
from millstream.client.inference import random_request
from millstream.client.models import AVAILABLE
from millstream.client.upload import ModelFiles
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.names import check_name
from millstream.services.plugin.registry import contributions
from millstream.services.process.waits import with_jitter

if TYPE_CHECKING:
    from millstream.services.settings import Settings

START_S_MAX = 120.0
#: Longest wait of the start for all models together, and then for the first of them to answer. A model that takes
#: longer serves when it is ready; it blocks neither the other models nor the start.
MODELS_S_MAX = 60.0
#: the same where nothing else is served: the start waits for a model as long as a load may take
LOAD_S_MAX = 900.0
ANSWER_S_MAX = 30.0
PAUSE_S = 0.05
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits"

#: errors of a server that is still starting, or busy
_NOT_YET = {Code.UNAVAILABLE, Code.OVERLOADED, Code.EXPIRED}


@dataclass(frozen=True, slots=True)
class Preload:
    """A model to load. `example`: it is our example, which never replaces a model of that name."""

    name: str
    path: Path
    example: bool = False


@dataclass(frozen=True, slots=True)
class FailedModel:
    """A model that cannot be served, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that serves.

    `pushed`: whether it was uploaded now. `seconds`: round trip of an inference of one row; None: it is on standby.
    """

    name: str
    version: int
    pushed: bool
    seconds: float | None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is served from its own folder. `failure`: why it is not. `unloaded`: a user unloaded it."""

    name: str
    folder: Path
    versions: tuple[int, ...] = ()
    failure: str | None = None
    unloaded: bool = False


class Preloading(Protocol):
    """Models that a plug-in loads at the start: its contribution `preload`."""

    async def load(self, client: AsyncClient, show: Callable[[LoadedModel], None], wait_s: float) -> None:
        """Load them; `show` is called with the outcome of each, at the latest after `wait_s` of a long load.

        Raises Failure: they cannot be listed.
        """


@dataclass(frozen=True, slots=True)
class PreloadPlan:
    """What `millstream up` or `serve` loads before it is ready."""

    models: Sequence[Preload]
    others: Sequence[Preloading] = ()
    required: bool = False  # whether the start fails if none of them can be served, and waits however long they load


def preload_plan(settings: Settings, *, required: bool) -> PreloadPlan:
    """Return what the settings say. Raises Failure(INVALID), also for a file or folder that does not exist."""
    models = parse_preload(settings.preload, example=settings.gateways > 0)
    return PreloadPlan(models, preloadings(settings), required)


def preloadings(settings: Settings) -> list[Preloading]:
    """Return what plug-ins load at the start. Raises Failure(INVALID)."""
    made = [build(settings) for build in contributions("preload", FunctionType)]
    return [one for one in made if one is not None]


def parse_preload(models: str, *, example: bool) -> list[Preload]:
    """Parse `NAME=PATH,NAME=PATH`, and add the example unless `none` is among them.

    Raises Failure(INVALID), also for a path that does not exist.
    """
    preloads = []
    for part in filter(None, (part.strip() for part in models.split(","))):
        if part == "none":
            example = False
            continue
        name, equals, path = part.partition("=")
        if not equals or not path:
            raise invalid(f"--preload {part}: write NAME=PATH, like resnet=resnet18.onnx")
        check_name(name)
        file = Path(path).expanduser()
        if not file.is_file() and not file.is_dir():
            raise invalid(f"--preload {part}: there is no file or folder {path}")
        preloads.append(Preload(name, file))
    if example and all(model.name != "digits" for model in preloads):
        preloads.append(Preload("digits", EXAMPLE / "digits.onnx", example=True))
    return preloads


async def wait_until_live(client: AsyncClient) -> None:
    """Return when a gateway answers."""
    await _retry_while_busy(lambda: client.request("GET", "/v2/health/live"), START_S_MAX, "no gateway answers")


async def wait_until_ready(client: AsyncClient) -> bool:
    """Wait until the server reports ready and return True; False if it has workers, but no model answers yet."""
    send = lambda: client.request("GET", "/v2/health/ready")  # noqa: E731
    try:
        await _retry_while_busy(send, ANSWER_S_MAX, "the server is not ready")
    except Failure as failure:
        if failure.code not in _NOT_YET:
            raise
        if await client.workers():
            return False
        await _retry_while_busy(send, START_S_MAX - ANSWER_S_MAX, "the server is not ready")
    return True


async def load_models(
    client: AsyncClient, models: Sequence[Preload], wait_s: float = MODELS_S_MAX
) -> AsyncIterator[ServedModel | FailedModel]:
    """Load models one after the other, and yield the outcome of each. A failure does not stop the others.

    `wait_s`: longest wait for all of them.
    """
    deadline = time.monotonic() + wait_s
    for model in models:
        try:
            served = await load_model(client, model, deadline)
        except Failure as failure:
            yield FailedModel(model.name, failure.message)
        else:
            if served is not None:
                yield served


async def load_model(client: AsyncClient, model: Preload, deadline: float) -> ServedModel | None:
    """Load a model and try one inference; return None for an example whose name is already used.

    A file that was already uploaded, judging by its digest, is not pushed again. Raises Failure if the model
    fails or is not ready by `deadline` (monotonic).
    """
    known = await _stored_versions(client, model.name)
    digest = (await asyncio.to_thread(ModelFiles.open, model.path)).sha256
    same = [one["version"] for one in known if one["digest"] == digest and one["version"] is not None]
    if model.example and known and not same:
        return None
    if same:
        version = same[-1]
    else:
        version = (await client.push(model.name, model.path))["version"]
    loaded = await _wait_for_version(client, model.name, version, deadline)
    seconds = await _time_inference(client, model.name, version, deadline) if loaded else None
    return ServedModel(model.name, version, not same, seconds)


async def _stored_versions(client: AsyncClient, name: str) -> list[ListedVersion]:
    """Return the documents of the versions on the server; empty for an unknown model."""
    try:
        return await client.versions(name)
    except ModelNotFound:
        return []


async def _wait_for_version(client: AsyncClient, name: str, version: int, deadline: float) -> bool:
    """Wait until the version is loaded (True) or on standby. Raises Failure if it fails or is neither by `deadline`."""
    while (document := await client.version(name, version))["state"] not in AVAILABLE:
        if document["state"] == "failed":
            raise Failure(Code.MODEL, f"{name} version {version} cannot be served: {document['reason']}")
        if time.monotonic() > deadline:
            state = f"is still {document['state']}"
            pools = " or ".join(document["pools"])
            raise Failure(Code.UNAVAILABLE, f"{name} version {version} {state}: has pool {pools} a worker?")
        await asyncio.sleep(with_jitter(PAUSE_S))
    return document["state"] == "ready"


async def _time_inference(client: AsyncClient, name: str, version: int, deadline: float) -> float:
    """Return the seconds of one inference of one row, after a first one that may be retried until `deadline`."""
    request = random_request(await client.metadata(name, version), 1, np.random.default_rng(0))

    async def send() -> None:
        await client.infer(name, request, version=version)

    await _retry_while_busy(send, max(5.0, deadline - time.monotonic()), f"{name} version {version} does not answer")
    started = time.perf_counter()
    await send()
    return time.perf_counter() - started


async def _retry_while_busy(send: Callable[[], Awaitable[Any]], limit_s: float, what: str) -> None:
    """Call `send` until the server is no longer starting or busy, for `limit_s`; `what` begins the error message."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            await send()
            return
        except Failure as failure:
            if failure.code not in _NOT_YET:
                raise
            if time.monotonic() > deadline:
                raise Failure(failure.code, f"{what} after {limit_s:g} s: {failure.message}") from failure
        await asyncio.sleep(with_jitter(PAUSE_S))
