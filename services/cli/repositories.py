"""Model repositories that `millstream up` serves in place: each model loaded, as it is now; what is gone from them goes.

A model that cannot be loaded is told of and stops nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.services.cli.client import Api
from millstream.services.cli.preload import Preload
from millstream.services.errors import Failure, invalid
from millstream.services.process.cancel import cancel_all
from millstream.services.triton_config.repositories import model_names

LOAD_S_MAX = 900.0
AT_ONCE_MAX = 4
LONG_LOAD_S = 5.0  # after which a load lets the next begin beside it
PATIENCE_S = 60.0  # after which nobody waits for what is still loading


@dataclass(frozen=True, slots=True)
class PreloadPlan:
    """What `millstream up` has in place before it is ready."""

    models: Sequence[Preload]
    repositories: Sequence[Path] = ()


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """A model of a repository. `failure`: why it is not served. `unloaded`: somebody unloaded it, and it stays so."""

    name: str
    folder: Path
    versions: tuple[int, ...] = ()
    failure: str | None = None
    unloaded: bool = False


def repositories(folders: Sequence[Path]) -> list[Path]:
    """The folders, if they are there. Raises Failure(INVALID)."""
    for folder in folders:
        if not folder.is_dir():
            raise invalid(f"--triton-repository {folder}: there is no such folder")
    return list(dict.fromkeys(folders))


async def place(api: Api, folders: Sequence[Path], show: Callable[[RepositoryModel], None]) -> None:
    """Load every model of `folders` that is not unloaded, and remove models that are no longer in them.

    Raises Failure(INVALID) for a folder that cannot be listed.
    """
    known = {model["name"]: model for model in await api.models()}
    there = [(folder, name) for folder in folders for name in await asyncio.to_thread(model_names, folder)]
    for name, model in known.items():
        if model["source"] is not None and (Path(model["source"]), name) not in there:
            await api.remove(name, None)
    turns = asyncio.Semaphore(AT_ONCE_MAX)

    async def one(folder: Path, name: str) -> None:
        async with turns:
            loading = asyncio.ensure_future(_load(api, folder, name, known.get(name)))
            await asyncio.wait({loading}, timeout=LONG_LOAD_S)
        done, _ = await asyncio.wait({loading}, timeout=PATIENCE_S)
        if done:
            show(loading.result())
        else:  # the endpoint goes on with it
            await cancel_all([loading])
            show(RepositoryModel(name, folder, failure=f"it is still loading after {PATIENCE_S + LONG_LOAD_S:g} s"))

    await asyncio.gather(*(one(folder, name) for folder, name in there))


async def _load(api: Api, folder: Path, name: str, known: dict[str, Any] | None) -> RepositoryModel:
    if known is not None and known["unloaded"]:
        return RepositoryModel(name, folder, unloaded=True)
    try:
        await api.load(name, wait_s=LOAD_S_MAX, retry=False)
        model = await api.model(name)
    except Failure as failure:
        return RepositoryModel(name, folder, failure=failure.message)
    return RepositoryModel(name, folder, tuple(version["version"] for version in model["versions"]))
