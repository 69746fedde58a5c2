"""From processes that run to an endpoint that serves: models in place, and an inference through the real path.

live -> push what is not there yet -> ready -> canary -> health says ready
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from millstream.services.cli.client import Api, digest_of
from millstream.services.cli.infer_codec import made_up_call
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.names import check_name

START_S_MAX = 120.0
#: how long the start waits for models, all together, and then for the first of them to answer: what is not ready by then
#: serves when it is, and stops neither the others nor the start
MODELS_S_MAX = 60.0
ANSWER_S_MAX = 30.0
PAUSE_S = 0.05
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits"

#: what an endpoint that is still starting, or busy, answers
_NOT_YET = {Code.UNAVAILABLE, Code.OVERLOADED, Code.EXPIRED}


@dataclass(frozen=True, slots=True)
class Preload:
    """A model to have in place. `example`: ours, which gives way to whatever has its name."""

    name: str
    path: Path
    example: bool = False


@dataclass(frozen=True, slots=True)
class Missing:
    """A model that does not serve, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that serves. `pushed`: it was uploaded just now. `seconds`: one inference of one row, there and back."""

    name: str
    version: int
    pushed: bool
    seconds: float


def preloads(models: str, *, example: bool) -> list[Preload]:
    """`NAME=PATH,NAME=PATH` and the example -> what to load. Raises Failure(INVALID) for what cannot be there."""
    wanted = []
    for part in filter(None, (part.strip() for part in models.split(","))):
        name, equals, path = part.partition("=")
        if not equals or not path:
            raise invalid(f"--preload {part}: write NAME=PATH, like resnet=resnet18.onnx")
        check_name(name)
        found = Path(path).expanduser()
        if not found.is_file():
            raise invalid(f"--preload {part}: there is no file {path}")
        wanted.append(Preload(name, found))
    if example and all(model.name != "digits" for model in wanted):
        wanted.append(Preload("digits", EXAMPLE / "digits.onnx", example=True))
    return wanted


async def live(api: Api) -> None:
    """Return when a gateway answers."""
    await _until(lambda: api.send("GET", "/v2/health/live"), START_S_MAX, "no gateway answers")


async def ready(api: Api) -> bool:
    """Return when the endpoint calls itself ready; False: it has workers, but no model of it answers for now."""
    send = lambda: api.send("GET", "/v2/health/ready")  # noqa: E731
    try:
        await _until(send, ANSWER_S_MAX, "the endpoint is not ready")
    except Failure as failure:
        if failure.code not in _NOT_YET:
            raise
        if (await api.send("GET", "/admin/v1/workers")).json()["workers"]:
            return False
        await _until(send, START_S_MAX - ANSWER_S_MAX, "the endpoint is not ready")
    return True


async def place_all(api: Api, models: Sequence[Preload], pool: str) -> AsyncIterator[ServedModel | Missing]:
    """Have models served, one after the other. One that cannot be, or takes long, stops neither the others nor the start."""
    deadline = time.monotonic() + MODELS_S_MAX
    for model in models:
        try:
            placed = await place(api, model, pool, deadline)
        except Failure as failure:
            yield Missing(model.name, failure.message)
        else:
            if placed is not None:
                yield placed


async def place(api: Api, model: Preload, pool: str, deadline: float) -> ServedModel | None:
    """Have a model served, and try it once; None for an example whose name is taken.

    A file that is there already, by its digest, is not pushed again. `pool`: which one serves it if it is pushed.
    Raises Failure if it does not serve, or does not by `deadline` (monotonic).
    """
    known = await _known(api, model.name)
    digest = await asyncio.to_thread(digest_of, model.path)
    same = [version for version in known if version["digest"] == digest]
    if model.example and known and not same:
        return None
    if same:
        document = same[-1]
    else:
        config = {"pool": pool} if pool != "cpu" else None
        document = await api.push(model.name, model.path, config=config)
    version = document["version"]
    await _ready(api, model.name, version, deadline)
    return ServedModel(model.name, version, not same, await _canary(api, model.name, version, deadline))


async def _known(api: Api, name: str) -> list[dict[str, Any]]:
    try:
        model = await api.model(name)
    except Failure as failure:
        if failure.code is Code.NOT_FOUND:
            return []
        raise
    versions: list[dict[str, Any]] = model["versions"]
    return versions


async def _ready(api: Api, name: str, version: int, deadline: float) -> None:
    while (document := await api.version(name, version))["state"] != "ready":
        if document["state"] == "failed":
            raise Failure(Code.MODEL, f"{name} version {version} cannot be served: {document['reason']}")
        if time.monotonic() > deadline:
            said = f"is still {document['state']} after {MODELS_S_MAX:g} s"
            raise Failure(Code.UNAVAILABLE, f"{name} version {version} {said}: has pool {document['pool']} a worker?")
        await asyncio.sleep(PAUSE_S)


async def _canary(api: Api, name: str, version: int, deadline: float) -> float:
    call = made_up_call(await api.metadata(name, version), 1, np.random.default_rng(0))

    async def send() -> None:
        await api.infer(name, version, call.body, call.header_bytes)

    await _until(send, max(5.0, deadline - time.monotonic()), f"{name} version {version} does not answer")
    started = time.perf_counter()
    await send()
    return time.perf_counter() - started


async def _until(send: Callable[[], Awaitable[Any]], limit_s: float, what: str) -> None:
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
        await asyncio.sleep(PAUSE_S)
