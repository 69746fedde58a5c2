"""Finds the versions of a load: in a model repository in place, in the call's files, or in uploads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from millstream.plugins.compat.triton.candidates import Candidate
from millstream.plugins.compat.triton.config.config import ParsedConfig
from millstream.plugins.compat.triton.config.model_folder import check_config, read_model_folder, served_versions
from millstream.plugins.compat.triton.load_changes import LoadChanges
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.manifest import Manifest
from millstream.services.model.names import plain_path
from millstream.services.process.threads import to_end_in_storage_thread
from millstream.services.repository.disk import storage_errors
from millstream.services.repository.folder import FolderRepository

FILES_MAX = 10_000  # files of one load; more are refused


class VersionSource(NamedTuple):
    """The versions that a load is to serve."""

    folder: Path | None  # the model repository in place that has the model; None: files of the call, or uploads
    config: ParsedConfig | None
    candidates: Sequence[Candidate]  # versions that need a check
    unchanged: Sequence[Manifest] = ()  # versions that need no check: they serve as they were uploaded


class VersionSources:
    """Finds the versions of a load. Methods raise Failure for a model or configuration that cannot be served."""

    def __init__(self, repository: FolderRepository, changes: LoadChanges, bytes_max: int) -> None:
        """Args:
        repository: Holds the uploaded versions, and the files of loads.
        changes: Reads endpoints and manifests.
        bytes_max: Limit on the files that are sent with one load.
        """
        self._repository = repository
        self._changes = changes
        self._bytes_max = bytes_max

    async def find(
        self, model: str, folder: Path | None, config: ParsedConfig | None, files: Mapping[str, bytes]
    ) -> VersionSource:
        """Return the versions of a load.

        Args:
            model: Name of the model.
            folder: The model repository in place that has the model; None: no repository has it.
            config: Sent with the call, to replace the model's own; None: not sent.
            files: Sent with the call, to replace the model's own, by path below its folder.
        """
        if files:
            return await self._from_files(model, config, files, folder)
        if folder is not None:
            await asyncio.to_thread(self._refuse_uploaded, model)
            return await asyncio.to_thread(self._in_place, model, folder / model, config, folder)
        return await to_end_in_storage_thread(self._from_uploads, model, config)

    def _in_place(self, model: str, path: Path, config: ParsedConfig | None, folder: Path | None) -> VersionSource:
        model_folder = read_model_folder(path, model, config)
        now = self._changes.manifests(model)
        candidates = [
            Candidate(model, version, path, served, str(path), now.get(version))
            for version, served in model_folder.served.items()
        ]
        return VersionSource(folder, model_folder.parsed, candidates)

    async def _from_files(
        self, model: str, config: ParsedConfig | None, files: Mapping[str, bytes], folder: Path | None
    ) -> VersionSource:
        if config is None:
            raise invalid("files are sent without a config, which must be sent with them")
        if folder is not None:
            await asyncio.to_thread(self._refuse_uploaded, model)
        path = await to_end_in_storage_thread(self._add_files, model, files)
        try:
            return await asyncio.to_thread(self._in_place, model, path, config, folder)
        except BaseException:
            await to_end_in_storage_thread(self._repository.staged.abort, model)
            raise

    def _add_files(self, model: str, files: Mapping[str, bytes]) -> Path:
        """Write the files into the repository, and return the folder that holds them."""
        if sum(map(len, files.values())) > self._bytes_max:
            raise Failure(Code.TOO_LARGE, f"the files have more than {self._bytes_max} bytes")
        if len(files) > FILES_MAX:
            raise invalid(f"more than {FILES_MAX} files are sent")
        with self._repository.open_staging() as staging, storage_errors(staging.path):
            for path, content in files.items():
                target = staging.path / plain_path(path, "file")
                try:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content)
                except (FileExistsError, NotADirectoryError, IsADirectoryError):
                    raise invalid(f"file {path[:80]!a} is both a file and a folder") from None
            return self._repository.staged.add_files(model, staging)

    def _from_uploads(self, model: str, config: ParsedConfig | None) -> VersionSource:
        """Return the versions as they were uploaded; with a configuration, those that it selects, configured by it."""
        staged = self._repository.staged
        originals = {version: staged.original(model, version) for version in self._repository.versions(model)}
        uploaded = {version: manifest for version, manifest in originals.items() if manifest is not None}
        if not uploaded:
            raise Failure(Code.NOT_FOUND, "")
        if config is None:
            return VersionSource(None, None, (), tuple(uploaded.values()))
        check_config(config, model)
        versions = tuple(uploaded)
        if config.message.HasField("version_policy"):
            versions = served_versions(config.message, versions)
        now = self._changes.manifests(model)
        candidates = [self._uploaded(uploaded[version], now[version]) for version in versions]
        return VersionSource(None, config, candidates)

    def _uploaded(self, manifest: Manifest, now: Manifest) -> Candidate:
        folder = self._repository.folder_of(manifest)
        return Candidate(
            manifest.model, manifest.version, folder, manifest.served, manifest.origin, now, manifest.digest
        )

    def _refuse_uploaded(self, model: str) -> None:
        endpoint = self._changes.endpoint(model)
        if endpoint is not None and endpoint.source is None and self._repository.versions(model):
            raise Failure(
                Code.INVALID,
                f"an uploaded model has this name: delete it (millstream rm {model}) to serve this one",
            )
