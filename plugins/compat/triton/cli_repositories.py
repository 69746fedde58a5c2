"""Loads the models of Triton repositories that `millstream up` serves in place, from their current files.

Models that were removed from a repository are deleted. A model that cannot be loaded is reported and blocks no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from millstream.client.async_client import AsyncClient
from millstream.client.documents import Model
from millstream.plugins.compat.triton.config.repositories import model_names
from millstream.plugins.compat.triton.settings import TritonSettings
from millstream.services.cli.preload import LOAD_S_MAX, MODELS_S_MAX, LoadedModel
from millstream.services.errors import Failure, invalid
from millstream.services.process.cancellation import cancel_all
from millstream.services.settings import Settings, settings_of

LOADS_MAX = 4
LONG_LOAD_S = 5.0  # a load that takes longer lets the next one start


def repositories_of(settings: Settings) -> Repositories | None:
    """Return the repositories in the settings; None: there are none. Raises Failure(INVALID) if one does not exist."""
    folders = settings_of(settings, TritonSettings).triton_repository_dirs
    for folder in folders:
        if not folder.is_dir():
            raise invalid(f"--triton-repository {folder}: the folder does not exist")
    return Repositories(list(dict.fromkeys(folders))) if folders else None


class Repositories:
    """The repositories that are served in place."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    async def load(
        self, client: AsyncClient, show: Callable[[LoadedModel], None], wait_s: float = MODELS_S_MAX
    ) -> None:
        """Load every model that was not unloaded by a user, and delete those that are no longer in a repository.

        `show` is called with the outcome of each model, at the latest after `wait_s` of a long load. Raises
        Failure(INVALID) for a folder that cannot be listed.
        """
        await _load_all(client, self._folders, show, wait_s)


async def _load_all(
    client: AsyncClient, folders: Sequence[Path], show: Callable[[LoadedModel], None], wait_s: float
) -> None:
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
            show(LoadedModel(name, folder, failure=f"it is still loading after {wait_s + LONG_LOAD_S:g} s"))

    await asyncio.gather(*(load(folder, name) for folder, name in existing))


async def _load(client: AsyncClient, folder: Path, name: str, known: Model | None) -> LoadedModel:
    if known is not None and known["unloaded"]:
        return LoadedModel(name, folder, unloaded=True)
    try:
        versions = await client.load(name, retry=False, timeout=LOAD_S_MAX)
    except Failure as failure:
        return LoadedModel(name, folder, failure=failure.message)
    return LoadedModel(name, folder, tuple(versions))
