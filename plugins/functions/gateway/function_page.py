"""What a gateway shows of a version that is a function: its packages, what it may do, its code and how it was built.

GET …/models/NAME/versions/N ─> `function`: what any reader of the model sees
GET …/models/NAME/versions/N/function ─> FunctionPage, for those who may change the model: code may have secrets
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from millstream.gateway.http.adapter import Adapter, Place, Routes, Tag
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.errors import documented
from millstream.plugins.functions.document import FORMAT, FunctionDocument, read_document
from millstream.plugins.functions.function_packages import BUILD_LOG, ENVIRONMENTS, key_of
from millstream.services.access.scopes import Need, Row
from millstream.services.errors import not_found
from millstream.services.ingest.importers import SOURCE
from millstream.services.model.manifest import Manifest
from millstream.services.process.threads import in_storage_thread

CODE_BYTES_MAX = 64 << 10  # of a file that is shown; the rest is cut
LOCK_BYTES_MAX = 1 << 20
LOG_BYTES_MAX = 8 << 10  # the end of a build log
PACKAGES_MAX = 500
_LOCKED = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^ ;\\\n]+)", re.MULTILINE)
_CONFINED = [
    "files: its own version's, and a folder of temporary ones; nothing else of the machine",
    "network and other processes: none",
]
_UNCONFINED = "files, network, processes: those of its worker where the kernel cannot confine it, as the server is set"

router = APIRouter(prefix="/admin/v1")


class FunctionPage(BaseModel):
    """The code of a version, and how its environment was built."""

    file: str = Field(description="The file that is served, in the upload.")
    code: str = Field(description=f"Its first {CODE_BYTES_MAX >> 10} KiB; what is not UTF-8 is replaced.")
    cut: bool = Field(description="Whether the file is longer.")
    build_log: str = Field(description="The end of what uv said when this machine built its environment; often empty.")


def function_of(deps: Deps, manifest: Manifest) -> dict[str, Any]:
    """Return what a function adds to the page of its version. Blocking."""
    if manifest.source_format != FORMAT:
        return {}
    folder = deps.repository.local_path(manifest.model, manifest.version)
    try:
        document = read_document(folder / manifest.served)
        locked = _read(folder / document.lock, LOCK_BYTES_MAX)[0] if document.lock else None
    except (OSError, ValueError):  # it was removed, or damaged
        return {}
    run_ms = manifest.config.run_ms_max
    may = [_UNCONFINED] if deps.settings.unconfined_imports == "accept" else _CONFINED
    time = f"{run_ms:g} ms" if run_ms else "as any run"
    found = {
        "file": _shown(document),
        "python": document.producer,
        "packages": None if locked is None else ["==".join(one) for one in _LOCKED.findall(locked)][:PACKAGES_MAX],
        "may": [*may, "memory: what its worker may still take", f"time of a run: {time}"],
    }
    return {"function": found}


@router.get(
    "/models/{name}/versions/{version}/function",
    summary="The code of a function, and its build log",
    responses=documented(400, 404),
)
async def get_function(name: str, version: int, deps: DepsOf) -> FunctionPage:
    manifest = deps.catalog.snapshot.model(name).published(version).manifest
    return await in_storage_thread(_page, deps, manifest)


def _page(deps: Deps, manifest: Manifest) -> FunctionPage:
    """Return the page of a function. Blocking. Raises Failure(NOT_FOUND): it is none, or its files are gone."""
    if manifest.source_format != FORMAT:
        raise not_found(f"version {manifest.version} of '{manifest.model}' is no function")
    folder = deps.repository.local_path(manifest.model, manifest.version)
    try:
        document = read_document(folder / manifest.served)
        code, cut = _read(folder / document.file, CODE_BYTES_MAX)
    except (OSError, ValueError):
        raise not_found(f"the file of version {manifest.version} of '{manifest.model}' cannot be read") from None
    return FunctionPage(file=_shown(document), code=code, cut=cut, build_log=_build_log(deps, folder, document))


def _build_log(deps: Deps, folder: Path, document: FunctionDocument) -> str:
    if not document.lock:
        return ""
    try:
        key = key_of((folder / document.lock).read_bytes())
        content = (deps.settings.home / ENVIRONMENTS / key / BUILD_LOG).read_bytes()
    except OSError:  # another machine has built it
        return ""
    return content[-LOG_BYTES_MAX:].decode(errors="replace")


def _shown(document: FunctionDocument) -> str:
    return document.file.removeprefix(f"{SOURCE}/")


def _read(path: Path, bytes_max: int) -> tuple[str, bool]:
    """Return the beginning of a file as text, and whether there is more. Raises OSError."""
    with path.open("rb") as file:
        content = file.read(bytes_max + 1)
    return content[:bytes_max].decode(errors="replace"), len(content) > bytes_max


_TAG = Tag("admin: functions", "The code of versions that are functions.", Place.OPEN)
ADAPTER = Adapter(
    routes=(Routes(router, _TAG, keyed=True, order=320),),
    access={("GET", "/admin/v1/models/{name}/versions/{version}/function"): Row(Need.WRITE, "name", admin=True)},
)
