"""Loads the models of Triton repositories that `millstream up` serves in place, from their current files.

Models that were removed from a repository are deleted. A model that cannot be loaded is reported and blocks no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.client.async_client import AsyncClient
from millstream.client.documents import Model
from millstream.plugins.compat.triton.config.repositories import model_names
from millstream.services.cli.preload import Preload
from millstream.services.errors import Failure, invalid
from millstream.services.process.cancel import cancel_all

LOAD_S_MAX = 900.0
LOADS_MAX = 4
LONG_LOAD_S = 5.0  # a load that takes longer lets the next one start
WAIT_S_MAX = 60.0  # further wait for a long load; then the start continues without it


@dataclass(frozen=True, slots=True)
class PreloadPlan:
    """The models and repositories that `millstream up` or `serve` loads before it is ready."""

    models: Sequence[Preload]
    repositories: Sequence[Path] = ()
    required: bool = False  # whether the start fails if none of them can be served, and waits however long they load


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """A model of a repository. `failure`: why it is not served. `unloaded`: a user unloaded it; it stays unloaded."""

    name: str
    folder: Path
    versions: tuple[int, ...] = ()
    failure: str | None = None
    unloaded: bool = False


def check_folders(folders: Sequence[Path]) -> list[Path]:
    """Return the folders without duplicates. Raises Failure(INVALID) if one does not exist."""
    for folder in folders:
        if not folder.is_dir():
            raise invalid(f"--triton-repository {folder}: the folder does not exist")
    return list(dict.fromkeys(folders))


async def load_repositories(
    client: AsyncClient, folders: Sequence[Path], show: Callable[[RepositoryModel], None], wait_s: float = WAIT_S_MAX
) -> None:
    """Load every model of `folders` that was not unloaded by a user, and delete those that are no longer in them.

    `show` is called with the outcome of each model, at the latest after `wait_s` of a long load. Raises
    Failure(INVALID) for a folder that cannot be listed.
    """
    known = {model["name"]: model for model in await client.models()}
    existing = [(folder, name) for folder in folders for name in await asyncio.to_thread(model_names, folder)]
    for name, model in known.items():
        if model["source"] is not None and (Path(model["source"]), name) not in existing:
            await client.remove(name, None)
    slots = asyncio.Semaphore(LOADS_MAX)

    async def load(folder: Path, name: str) -> None:
        async with slots:
            loading = asyncio.ensure_future(_load(client, folder, name, known.get(name)))
            await asyncio.wait({loading}, timeout=LONG_LOAD_S)
        done, _ = await asyncio.wait({loading}, timeout=wait_s)
        if done:
            show(loading.result())
        else:  # the server continues the load
            await cancel_all([loading])
            show(RepositoryModel(name, folder, failure=f"it is still loading after {wait_s + LONG_LOAD_S:g} s"))

    await asyncio.gather(*(load(folder, name) for folder, name in existing))


async def _load(client: AsyncClient, folder: Path, name: str, known: Model | None) -> RepositoryModel:
    if known is not None and known["unloaded"]:
        return RepositoryModel(name, folder, unloaded=True)
    try:
        versions = await client.load(name, retry=False, timeout=LOAD_S_MAX)
    except Failure as failure:
        return RepositoryModel(name, folder, failure=failure.message)
    return RepositoryModel(name, folder, tuple(versions))
