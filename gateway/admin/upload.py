"""From the first byte of an upload to a published version.

permit ─> bytes into a staging area ─> check ─> publish ─> activate
A form is read part by part. A management call may name a file below MILLSTREAM_IMPORT_DIR, or a folder, read as
a tar. An upload that fails, or whose caller disconnects, leaves nothing visible. Bodies are never in memory as a whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ValidationError

from millstream.gateway.access.principal import CALLER, Principal, owner_name, require
from millstream.gateway.admin.removal import remove_old_versions
from millstream.gateway.catalog.parts import is_current, used_versions
from millstream.gateway.catalog.quotas import Quotas
from millstream.gateway.http.deps import Deps
from millstream.gateway.http.multipart import MultipartReader, Sink
from millstream.gateway.scheduling.composed import composer_of
from millstream.gateway.tensors.json_document import excerpt
from millstream.services.access.scopes import Need, Row
from millstream.services.errors import Code, Failure, invalid, not_found
from millstream.services.ingest.importers import NETWORK, Importer, ImportOptions
from millstream.services.ingest.layout import recognise
from millstream.services.ingest.packing import parts_of, pieces
from millstream.services.ingest.report import CheckedModel
from millstream.services.ingest.upload import ModelUpload, Published
from millstream.services.model.formats import ONNX, backend_of
from millstream.services.model.manifest import Manifest, ModelConfig, QueuePolicy, Warmup, WarmupInput
from millstream.services.model.names import check_name
from millstream.services.nearest_names import unknown_key
from millstream.services.placement.pools import pools_text, unknown_pool
from millstream.services.process.audit import audit, audited
from millstream.services.process.threads import in_storage_thread
from millstream.services.settings import Settings
from millstream.services.supervisor.pool_specs import parse_pools
from millstream.services.wire.records import State


async def known_pools(deps: Deps, model: str) -> set[str]:
    """Return the pools there are: with workers, had workers, in the settings, or named for the model's versions."""
    snapshot = deps.catalog.snapshot
    known = {*snapshot.pools, *parse_pools(deps.settings.pools)}
    view = snapshot.models.get(model)
    known.update(*(version.pools for version in view.versions.values()) if view is not None else ())
    with suppress(Failure):  # without Redis only those that this gateway has seen
        known |= await deps.cluster_state.pools()
    return known


async def check_pools(deps: Deps, model: str, pools: Iterable[str]) -> None:
    """Raise Failure(INVALID), which names the pools that exist, for a pool that there is not."""
    named = set(pools)
    if not named:
        return
    known = await known_pools(deps, model)
    for pool in sorted(named - known):
        raise unknown_pool("config.pools", pool, known)


def loaded_formats(deps: Deps, named: Collection[str]) -> frozenset[str]:
    """Return the formats that the workers load of the pools that may serve a model; empty if some are not known."""
    pools = deps.catalog.snapshot.pools
    traits = [pools.get(pool) for pool in named or {*pools, *parse_pools(deps.settings.pools)}]
    if not all(one is not None and one.formats for one in traits):
        return frozenset()
    return frozenset(one for found in traits if found is not None for one in found.formats)


def check_format(deps: Deps, named: Collection[str], source_format: str) -> None:
    """Raise Failure(INVALID) if workers of all pools that may serve a model load other formats than its own.

    A pool whose workers were never seen may load any. Every installation has a backend for ONNX, or is to have one.
    """
    if source_format == ONNX or composer_of(source_format) is not None:
        return
    pools = deps.catalog.snapshot.pools
    traits = [pools.get(pool) for pool in named or {*pools, *parse_pools(deps.settings.pools)}]
    if traits and all(one is not None and one.formats and source_format not in one.formats for one in traits):
        backend = backend_of(source_format)
        raise invalid(
            f"no worker of {pools_text(sorted(named or pools))} loads {source_format}: start workers that do, like "
            f"`millstream up --pool {backend}=1,backend={backend}`"
        )


_SCHEME = "file"


def locate(folder: Path | None, url: str) -> Path:
    """Return the file or folder below `folder` that a management call names by a path or a file:// URL. Blocking.

    Raises Failure: UNSUPPORTED (no folder is allowed, or another scheme), INVALID (outside the folder), NOT_FOUND.
    """
    parts = urlsplit(url) if "://" in url else None
    if parts is not None and parts.scheme.lower() != _SCHEME:
        raise Failure(
            Code.UNSUPPORTED,
            f"no model is fetched from '{excerpt(url)}': put the file below MILLSTREAM_IMPORT_DIR, or upload it with "
            "PUT /admin/v1/models/NAME/versions/N",
        )
    if folder is None:
        raise Failure(
            Code.UNSUPPORTED, "models are registered from files only where MILLSTREAM_IMPORT_DIR names their folder"
        )
    path = unquote(parts.path) if parts is not None else url
    if not path or "\0" in path:
        raise invalid("'url' is the path of a model file")
    try:
        root = folder.resolve()
        located = (root / path).resolve()
        inside = located.is_relative_to(root)
        exists = inside and located.exists()
    except (OSError, RuntimeError, ValueError):
        raise invalid(f"'{excerpt(path)}' is not a path") from None
    if not inside:
        raise invalid(f"'{excerpt(path)}' is not below {root}: models are registered from there only")
    if not exists:
        raise not_found(f"there is no file '{excerpt(path)}' below {root}")
    return located


async def content(path: Path) -> AsyncIterator[bytes]:
    """Yield the bytes of the model in a file or folder. Raises Failure(INVALID) for what is none, links and devices."""
    read = await asyncio.to_thread(lambda: pieces(parts_of(recognise(path))))
    while (piece := await asyncio.to_thread(next, read, None)) is not None:
        yield piece


CONFIG_PART_BYTES_MAX = 64 * 1024

_MODEL, _CONFIG = "model", "config"
_NAME_CHARACTERS_MAX = 80  # of a part's name in a message


class UploadForm:
    """Extracts the model's bytes from the chunks of a body.

    Raises Failure(INVALID) for a form that is broken, incomplete or has other parts; TOO_LARGE for a long config.
    """

    def __init__(self, content_type: str) -> None:
        self._reader = MultipartReader(content_type, self._open_part)
        self._has_model = False
        self._config: bytearray | None = None
        self._pieces: list[bytes] = []

    @property
    def config(self) -> bytes | None:
        """The part `config`; None until it has been received."""
        return None if self._config is None else bytes(self._config)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the pieces of the model's file in `chunk`, in order."""
        self._pieces = []
        self._reader.feed(chunk)
        return self._pieces

    def close(self) -> None:
        """Check that the form is complete. Call it at the end of the body."""
        self._reader.close()
        if not self._has_model:
            raise invalid("the form has no part 'model' (the model's file)")

    def _open_part(self, name: str) -> Sink:
        if name == _MODEL:
            self._has_model = True
            return lambda piece: self._pieces.append(piece)  # noqa: PLW0108 - `feed` replaces the list
        if name == _CONFIG:
            self._config = bytearray()
            return self._add_config
        raise invalid(
            f"the form has a part '{name[:_NAME_CHARACTERS_MAX]}': only 'model' (a file) and 'config' (JSON) are known"
        )

    def _add_config(self, piece: bytes) -> None:
        assert self._config is not None
        if len(self._config) + len(piece) > CONFIG_PART_BYTES_MAX:
            raise Failure(
                Code.TOO_LARGE, f"the part 'config' is larger than the limit of {CONFIG_PART_BYTES_MAX} bytes"
            )
        self._config.extend(piece)


log = logging.getLogger("millstream.admin")

_UNKNOWN = "extra_forbidden"  # pydantic's name of the error
_NOTHING_ALLOWED = ImportOptions()
_WRITE = Row(Need.WRITE)
_SETTLED = frozenset({State.READY, State.STANDBY, State.FAILED, State.UNLOADED})


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload as the caller asks for it."""

    model: str
    version: int | None  # None: the next number
    config: ModelConfig | None
    sha256: str | None  # digest of the model's bytes, in hex; other bytes are refused
    activate: bool
    form: UploadForm | None  # reads the body as a form, which may have the config; None: the body is the model
    url: str | None = None  # the file or folder that the caller named; None: the body was sent
    size_bytes: int = 0  # as the caller declares it; 0: not known
    imports: ImportOptions = _NOTHING_ALLOWED  # what the import of a framework's model may do


def parse_config(text: str | bytes) -> ModelConfig:
    """Return the parsed `config` of an upload. Raises Failure(INVALID) that names the field."""
    try:
        config = ModelConfig.model_validate_json(text)
    except ValidationError as exc:
        errors = exc.errors(include_url=False)
        first = next((error for error in errors if error["type"] == _UNKNOWN), errors[0])
        *parents, name = ("config", *(str(part) for part in first["loc"]))
        if first["type"] == _UNKNOWN:
            valid = _model_at(first["loc"][:-1]).model_fields
            raise invalid(f"{'.'.join(parents)}: {unknown_key(name, valid)}") from None
        field = ".".join((*parents, name))
        raise invalid(f"{field}: {first['msg'].removeprefix('Value error, ')}") from None
    for pool in config.pools:
        check_name(pool, "config.pools")
    return config


def _model_at(location: Sequence[int | str]) -> type[BaseModel]:
    """Return the model whose fields are valid at a location within the configuration."""
    if "inputs" in location:
        return WarmupInput
    field = location[0] if location else None
    if field in {"queue", "queue_by_priority"}:
        return QueuePolicy
    return Warmup if field == "warmup" else ModelConfig


def check_right_to_code(allowed: str, imports: ImportOptions) -> None:
    """Raise Failure(FORBIDDEN) if the caller of the current task may not upload what can execute code.

    `allowed`: MILLSTREAM_IMPORT_CODE.
    """
    asked = " and ".join(name for name in ("allow_pickle", "allow_code") if getattr(imports, name))
    if not asked or allowed == "writers":
        return
    principal = CALLER.get()
    if allowed == "never":
        raise Failure(
            Code.FORBIDDEN, f"{asked}: this installation takes no upload that can execute code (MILLSTREAM_IMPORT_CODE)"
        )
    if principal is not None and not (principal.grants.admin or principal.grants.code):
        raise Failure(
            Code.FORBIDDEN,
            f"{principal.label} lacks the scope 'models:code', which {asked} needs here: such an upload can execute "
            "code (MILLSTREAM_IMPORT_CODE)",
        )


def check_right_to_serve_code(settings: Settings, importer: Importer, asked: frozenset[str] = frozenset()) -> None:
    """Raise Failure(FORBIDDEN) if the caller of the current task may not upload what workers run as code.

    `asked`: further scopes that the model asks for.
    """
    if importer.runs_code and (why := why_no_code(settings, CALLER.get(), importer.name)):
        raise Failure(Code.FORBIDDEN, why)
    principal = CALLER.get()
    if NETWORK not in asked or (principal is not None and principal.grants.network):
        return
    if principal is not None and not principal.grants.admin:
        raise Failure(
            Code.FORBIDDEN, f"{principal.label} lacks the scope {NETWORK!r}, and its code asks for the network"
        )
    if not _is_of_this_machine(settings.host):
        why = f"other machines reach this server, so a function that asks for the network needs a key with {NETWORK!r}"
        raise Failure(Code.FORBIDDEN, why)


def why_no_code(settings: Settings, principal: Principal | None, what: str) -> str:
    """Return why a caller may not upload `what`, which workers run as code; empty: it may.

    An operator may where no other machine reaches the server; elsewhere that is a decision of its own.
    """
    if settings.import_code == "writers":
        return ""
    if settings.import_code == "never":
        return "this installation takes no upload that is code (MILLSTREAM_IMPORT_CODE)"
    if principal is not None and principal.grants.code:
        return ""
    if principal is not None and not principal.grants.admin:
        return f"{principal.label} lacks the scope 'models:code', which an upload of {what} needs"
    if _is_of_this_machine(settings.host):
        return ""
    return (
        f"other machines reach this server, so an upload of {what} needs a key with the scope "
        "'models:code': millstream keys create NAME --scope models:write --scope models:code"
    )


def _is_of_this_machine(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def receive(deps: Deps, upload: Upload, body: AsyncIterator[bytes]) -> Published:
    """Publish `body` as a version, and activate it if asked to. When this returns, the catalog has the version.

    A version that has the same bytes and configuration already, and has not failed, stands for the upload.

    Raises Failure: FORBIDDEN, INVALID, TOO_LARGE, CONFLICT (versions are immutable), UNAVAILABLE (too many uploads),
    STORAGE; LimitReached.
    """
    require(Need.WRITE, upload.model)  # where a body named the model
    with audited("upload", upload.model):
        published = await _publish(deps, upload, body)
    manifest = published.manifest
    if published.new:
        audit(
            "uploaded",
            manifest.model,
            version=manifest.version,
            pools=" ".join(manifest.config.pools),
            activated=upload.activate,
            **{name: True for name, allowed in upload.imports if allowed},
        )
    elif upload.activate:
        audit("activated", manifest.model, version=manifest.version)
    return published


async def _publish(deps: Deps, upload: Upload, body: AsyncIterator[bytes]) -> Published:
    config = upload.config or ModelConfig()
    quotas = Quotas(deps.gate, deps.catalog, deps.repository)
    # ModelUpload rejects a bad name and an existing version here, before the caller has sent a gigabyte
    async with (
        quotas.upload(upload.model, upload.size_bytes) as admit,
        ModelUpload(deps.repository, deps.settings, upload.model, upload.version, config, upload.sha256) as incoming,
        deps.upload_slots.acquire(upload.model, upload.version) as show,
    ):
        await check_pools(deps, upload.model, config.pools)
        await _receive(incoming, upload, body)
        if incoming.config is not config:  # it was in the form
            await check_pools(deps, upload.model, incoming.config.pools)
        formats = loaded_formats(deps, incoming.config.pools)
        incoming.url = upload.url
        incoming.owner = owner_name()
        incoming.admit = admit
        incoming.take = partial(check_right_to_serve_code, deps.settings)
        incoming.reusable = lambda manifest: (
            not _has_failed(deps, manifest) and is_current(deps.catalog.snapshot.models, manifest)
        )
        incoming.options = upload.imports.model_copy(update={"formats": formats})

        def accept(checked: CheckedModel | None) -> CheckedModel | None:
            if checked is not None:
                check_format(deps, incoming.config.pools, checked.source_format)
                composer = composer_of(checked.source_format)
                if composer is not None:
                    path = incoming.folder() / checked.served
                    checked = composer.compose(path, checked, incoming.config, upload.model, deps.catalog.snapshot)
            if (principal := CALLER.get()) is not None:  # the check, and what it waits for, may take minutes
                deps.gate.check_still(principal, _WRITE, upload.model)
            return checked

        def gather(checked: CheckedModel) -> bool:
            composer, folder_of = composer_of(checked.source_format), deps.repository.local_path
            return composer is not None and composer.gather(
                incoming.folder(), checked, deps.catalog.snapshot, folder_of
            )

        incoming.gather = gather
        published = await incoming.publish(show, activate=upload.activate, accept=accept)
        if published.new and deps.settings.versions_kept:
            await _remove_old_versions(deps, upload.model)
        await deps.catalog.announce(upload.model)
    return published


def _has_failed(deps: Deps, manifest: Manifest) -> bool:
    model = deps.catalog.snapshot.models.get(manifest.model)
    view = model.versions.get(manifest.version) if model else None
    return view is not None and view.state is State.FAILED


async def _remove_old_versions(deps: Deps, model: str) -> None:
    try:
        kept, used = deps.settings.versions_kept, used_versions(deps.catalog.snapshot.models, model)
        removed = await in_storage_thread(remove_old_versions, deps.repository, model, kept, used)
    except Failure as failure:  # the upload is done: the next one tries again
        log.warning("old versions of %s stay: %s", model, failure.message)
        return
    for version in removed:
        audit("deleted", model, version=version)


async def _receive(incoming: ModelUpload, upload: Upload, body: AsyncIterator[bytes]) -> None:
    form = upload.form
    if form is None:
        async for chunk in body:
            await incoming.write(chunk)
        return
    async for chunk in body:
        for piece in form.feed(chunk):
            await incoming.write(piece)
    form.close()
    if form.config is not None:
        if upload.config is not None:
            raise invalid("config is sent twice: as a query parameter and as a part of the form")
        incoming.config = parse_config(form.config)


async def wait_until_ready(deps: Deps, manifest: Manifest, timeout_s: float) -> None:
    """Wait until the version is ready or on standby, has failed or was removed, but at most `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        model = deps.catalog.snapshot.models.get(manifest.model)
        view = model.versions.get(manifest.version) if model else None
        if view is None or view.state in _SETTLED:
            return
        left_s = deadline - loop.time()
        if left_s <= 0:
            return
        await deps.catalog.next_change(left_s)
