"""/v2/repository: Triton's model repository over HTTP. The index is open; load and unload need admin rights."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query, Request

from millstream.gateway.connection.budgets import BodyReservation
from millstream.gateway.connection.error_reply import too_large
from millstream.gateway.http.body import caller_of, read_body, read_reserved
from millstream.gateway.http.deps import DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import json_body, list_of, ref, reply
from millstream.gateway.tensors.json_text import JsonLimits, parse_json
from millstream.plugins.compat.triton.config.config import CONFIG_BYTES_MAX
from millstream.plugins.compat.triton.gateway import Triton
from millstream.plugins.compat.triton.loader import IndexEntry
from millstream.plugins.compat.triton.schemas import (
    LoadReply,
    LoadRequest,
    RepositoryIndexEntry,
    RepositoryIndexRequest,
    UnloadReply,
    UnloadRequest,
)
from millstream.services.errors import Code, Failure, invalid

router = APIRouter(prefix="/v2/repository")
protected = APIRouter(prefix="/v2/repository")

SMALL_BYTES_MAX = 64 * 1024
#: limit on a load with files in its body, which is kept in memory. Larger models are uploaded or served from a folder
LOAD_BYTES_MAX = 256 << 20
_VALUES_MAX = 100_000
_PIECE_CHARACTERS = 1 << 20  # characters of base64: a multiple of four
_FILE = "file:"


@router.post(
    "/index",
    summary="Models and versions of the repository, and their states",
    responses=reply(
        list_of(RepositoryIndexEntry),
        "The versions, by model and number.",
        example=[{"name": "digits", "version": "1", "state": "READY"}],
    )
    | documented(400, 413, 503),
    openapi_extra=json_body(RepositoryIndexRequest, required=False, example={"ready": True}),
)
async def repository_index(request: Request, deps: DepsOf) -> list[dict[str, str]]:
    ready = (await _document(await read_body(request, SMALL_BYTES_MAX), SMALL_BYTES_MAX)).get("ready", False)
    if not isinstance(ready, bool):
        raise invalid("ready: must be true or false")
    return [_entry(entry) for entry in deps.part(Triton).loader.index(ready=ready)]


@protected.post(
    "/models/{model}/load",
    summary="Load a model, or load it again, and wait until it serves",
    description="`config`: a ModelConfig as JSON text, in place of the model's own. `file:1/model.onnx`: a file's "
    "content in base64; files need a config and make up the "
    "whole model. If the load fails, the versions that served before still serve.",
    responses=reply(ref(LoadReply), "The model serves.", example={"name": "digits", "load": True, "versions": ["1"]})
    | documented(400, 413, 503, 507),
    openapi_extra=json_body(LoadRequest, required=False, example={"parameters": {"config": '{"max_batch_size": 8}'}}),
)
async def repository_model_load(
    model: str,
    request: Request,
    deps: DepsOf,
    retry: Annotated[
        bool, Query(description="Try again a version that ended the processes that loaded it, or took too long.")
    ] = True,
) -> dict[str, Any]:
    # The files stay in memory until the load has ended.
    with deps.receive_budget.reserve(caller_of(request)) as reservation:
        parameters = await _read_load(request, deps.settings.upload_bytes_max, reservation)
        versions = await deps.part(Triton).loader.load(model, parameters.config, parameters.files, retry=retry)
    return {"name": model, "load": True, "versions": [str(version) for version in versions]}


@protected.post(
    "/models/{model}/unload",
    summary="Stop serving a model; nothing is deleted",
    description="Requests in flight are still answered. The model answers again after it is loaded.",
    responses=reply(ref(UnloadReply), "The model does not serve.", example={"name": "digits", "unload": True})
    | documented(400, 413, 503),
    openapi_extra=json_body(UnloadRequest, required=False, example={"parameters": {}}),
)
async def repository_model_unload(model: str, request: Request, deps: DepsOf) -> dict[str, Any]:
    document = await _document(await read_body(request, SMALL_BYTES_MAX), SMALL_BYTES_MAX)
    parameters = _parameters(document)
    for name, value in parameters.items():
        if name != "unload_dependents" or not isinstance(value, bool):
            raise invalid(f"parameter {name[:80]!r}: only unload_dependents, true or false, is known")
    await deps.part(Triton).loader.unload(model, steps=parameters.get("unload_dependents", False))
    return {"name": model, "unload": True}


@router.post(
    "/{repository}/index",
    summary="Not supported: repositories have no names",
    status_code=501,
    responses=documented(501),
)
@router.post("/{repository}/models/{model}/load", include_in_schema=False)
@router.post("/{repository}/models/{model}/unload", include_in_schema=False)
async def named_repository_index(repository: str) -> None:
    raise Failure(Code.UNSUPPORTED, f"'repository_name' specification is not supported: {repository[:80]!r}")


class _LoadParameters(NamedTuple):
    config: str | None
    files: dict[str, bytes]


async def _read_load(request: Request, files_bytes_max: int, reservation: BodyReservation) -> _LoadParameters:
    """Return `config` and `file:…` of a load. Raises Failure: INVALID, TOO_LARGE, UNAVAILABLE (receive budget)."""
    # Base64 has four characters for three bytes.
    bytes_max = min(LOAD_BYTES_MAX, files_bytes_max // 3 * 4 + CONFIG_BYTES_MAX)
    document = await _document(await read_reserved(request, bytes_max, reservation), bytes_max)
    return await asyncio.to_thread(_load_parameters, _parameters(document), files_bytes_max)


def _load_parameters(parameters: dict[str, Any], files_bytes_max: int) -> _LoadParameters:
    config: str | None = None
    files: dict[str, bytes] = {}
    size = 0
    for name, value in parameters.items():
        if name != "config" and not name.startswith(_FILE):
            raise invalid(f"unexpected parameter {name[:80]!r}: only config and {_FILE}<path> are known")
        if not isinstance(value, str):
            raise invalid(f"parameter {name[:80]!r}: must be a string")
        if name == "config":
            config = value
            continue
        try:
            content = _from_base64(value)
        except (binascii.Error, ValueError):
            raise invalid(f"parameter {name[:80]!r}: this is not base64") from None
        size += len(content)
        if size > files_bytes_max:
            raise too_large(files_bytes_max)
        files[name.removeprefix(_FILE)] = content
    return _LoadParameters(config, files)


def _from_base64(text: str) -> bytes:
    """Return `text` decoded, in pieces, since the decoder holds the interpreter's lock. Raises ValueError."""
    pieces = [text[at : at + _PIECE_CHARACTERS] for at in range(0, len(text), _PIECE_CHARACTERS)]
    if any(piece.endswith("=") for piece in pieces[:-1]):
        raise ValueError("padding in the middle")
    return b"".join([base64.b64decode(piece, validate=True) for piece in pieces])


def _parameters(document: dict[str, Any]) -> dict[str, Any]:
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise invalid("parameters: must be an object")
    return parameters


async def _document(body: bytes, bytes_max: int) -> dict[str, Any]:
    """Return the JSON object in `body`; an empty body is {}. Raises Failure: INVALID, TOO_LARGE."""
    if not body:
        return {}
    return await asyncio.to_thread(parse_json, body, JsonLimits(bytes_max, _VALUES_MAX))


def _entry(entry: IndexEntry) -> dict[str, str]:
    """Return the entry as JSON, without empty members: a model that was never loaded has only a name."""
    fields = {"name": entry.name, "version": entry.version, "state": entry.state, "reason": entry.reason}
    return {name: value for name, value in fields.items() if value}
