"""The admin API for new versions. PUT names the version's number, POST uses the next number.

The body is the model, or a form with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response

from millstream.gateway.admin import schemas_models as schemas
from millstream.gateway.admin.standby_reasons import add_standby_reasons
from millstream.gateway.admin.upload import (
    CONFIG_PART_BYTES_MAX,
    Upload,
    UploadForm,
    check_right_to_code,
    parse_config,
    receive,
    wait_until_ready,
)
from millstream.gateway.http.body import declared_bytes, disconnected
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.multipart import is_form
from millstream.gateway.http.openapi import BINARY, OCTETS, content, header_ref, ref, request_body
from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.importers import INPUTS_MAX, ImportOptions
from millstream.services.ingest.upload import Published
from millstream.services.model.manifest import Manifest
from millstream.services.nearest_names import unknown_key
from millstream.services.process.audit import audited

router = APIRouter(prefix="/admin/v1", responses=documented(400, 403, 409, 413, 415, 429, 503, 507))

WAIT_S_MAX = 600.0

#: limit on the bytes of a form besides the model: the config, and boundaries and headers of two parts
_FORM_BYTES_MAX = CONFIG_PART_BYTES_MAX + 64 * 1024

#: what `curl -d @FILE` sends; it removes line breaks, which are bytes of every ONNX file
_CURL_DATA_TYPE = "application/x-www-form-urlencoded"
_CURL_ADVICE = "`curl -d` damages binary files: send the file with --data-binary, or to a version's number with -T"

_CONFIG_EXAMPLE = '{"rows_max": 32, "pools": ["cpu"]}'
_BODY = request_body(
    {
        OCTETS: BINARY,
        "multipart/form-data": content(ref(schemas.UploadForm)),
    },
    description="A model file, or a zip or tar with one and its other files: ONNX, or a framework's that is imported.",
)
_LOCATION = {"Location": header_ref("Location")}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"model": schemas.UploadedVersion, "description": "The version was there already.", "headers": _LOCATION},
    201: {"description": "The version, as far as it is known.", "headers": _LOCATION},
}


class _Options:
    """The query parameters and headers of both routes."""

    def __init__(  # noqa: PLR0913 - an argument for each
        self,
        request: Request,
        input: Annotated[  # noqa: A002 - the name of the parameter
            list[str],
            Query(
                default_factory=list,
                description="An input that the model's file does not describe, as TorchScript does not: "
                "name:datatype:shape, with -1 for a variable size.",
                examples=[["x:FP32:-1,3,224,224"]],
                max_length=INPUTS_MAX,
            ),
        ],
        allow_pickle: Annotated[
            bool, Query(description="Load a pickle, which can execute code: classes of a list alone, in the sandbox.")
        ] = False,
        allow_code: Annotated[
            bool, Query(description="Run code that a model's folder brings with it, in the sandbox.")
        ] = False,
        config: Annotated[
            str | None,
            Query(
                description="Settings of the version, as JSON (not together with the form's part).",
                examples=[_CONFIG_EXAMPLE],
            ),
        ] = None,
        wait: Annotated[
            float, Query(ge=0, le=WAIT_S_MAX, description="Seconds to wait until the version is ready or has failed.")
        ] = 0,
        activate: Annotated[bool, Query(description="Make this the version that answers.")] = True,
        x_content_sha256: Annotated[
            str | None,
            Header(
                pattern="^[0-9A-Fa-f]{64}$", description="sha256 of the model's bytes, in hex: refused if they differ."
            ),
        ] = None,
    ) -> None:
        known = ("config", "wait", "activate", "allow_pickle", "allow_code", "input")
        for name in request.query_params:
            if name not in known:
                raise invalid(unknown_key(name, known, "query parameter"))
        self.config = config
        self.wait_s = wait
        self.activate = activate
        self.imports = ImportOptions(allow_pickle=allow_pickle, allow_code=allow_code, inputs=tuple(input))
        self.sha256 = x_content_sha256.lower() if x_content_sha256 else None


_OptionsOf = Annotated[_Options, Depends()]


@router.put(
    "/models/{name}/versions/{version}",
    status_code=201,
    summary="Upload a version under a number of your own",
    responses=_RESPONSES,
    openapi_extra=_BODY,
)
async def upload_version(
    name: str, version: int, options: _OptionsOf, request: Request, response: Response, deps: DepsOf
) -> schemas.UploadedVersion:
    published = await _receive(deps, _upload(name, version, options, request, deps), request)
    return await _document(published, options, request, response, deps)


@router.post(
    "/models/{name}/versions",
    status_code=201,
    summary="Upload the next version",
    responses=_RESPONSES,
    openapi_extra=_BODY,
)
async def upload_next_version(
    name: str, options: _OptionsOf, request: Request, response: Response, deps: DepsOf
) -> schemas.UploadedVersion:
    published = await _receive(deps, _upload(name, None, options, request, deps), request)
    return await _document(published, options, request, response, deps)


def _upload(name: str, version: int | None, options: _Options, request: Request, deps: Deps) -> Upload:
    """Return the upload that a request asks for. Raises Failure for whatever can be refused before the body is read."""
    with audited("upload", name):
        return _checked(name, version, options, request, deps)


def _checked(name: str, version: int | None, options: _Options, request: Request, deps: Deps) -> Upload:
    check_right_to_code(deps.settings.import_code, options.imports)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise Failure(Code.ENCODING, f"Content-Encoding '{encoding}': send the upload uncompressed")
    content_type = request.headers.get("content-type", "")
    form = UploadForm(content_type) if is_form(content_type) else None
    bytes_max = deps.settings.upload_bytes_max
    if declared_bytes(request) > bytes_max + (_FORM_BYTES_MAX if form else 0):
        raise Failure(Code.TOO_LARGE, f"the upload is larger than the limit of {bytes_max} bytes")
    return Upload(
        model=name,
        version=version,
        config=None if options.config is None else parse_config(options.config),
        sha256=options.sha256,
        activate=options.activate,
        form=form,
        size_bytes=declared_bytes(request),
        imports=options.imports,
    )


async def _receive(deps: Deps, upload: Upload, request: Request) -> Published:
    """Store the body as a version. Raises Failure, which says so if `curl -d` sent the file without its line breaks."""
    received_bytes = 0
    has_line_breaks = False

    async def body() -> AsyncIterator[bytes]:
        nonlocal received_bytes, has_line_breaks
        async for chunk in request.stream():
            received_bytes += len(chunk)
            has_line_breaks = has_line_breaks or b"\n" in chunk
            yield chunk

    try:
        return await receive(deps, upload, body())
    except Failure as failure:
        from_curl = request.headers.get("content-type", "").startswith(_CURL_DATA_TYPE)
        if failure.code is Code.INVALID and from_curl and received_bytes and not has_line_breaks:
            raise Failure(Code.INVALID, f"{failure.message}; {_CURL_ADVICE}") from failure
        raise


async def _document(
    published: Published, options: _Options, request: Request, response: Response, deps: Deps
) -> schemas.UploadedVersion:
    manifest = published.manifest
    if options.wait_s:
        await _wait(deps, manifest, options.wait_s, request)
    response.headers["Location"] = f"/admin/v1/models/{manifest.model}/versions/{manifest.version}"
    response.status_code = 201 if published.new else 200
    document = schemas.published(manifest, deps.catalog.snapshot, existing=not published.new)
    await add_standby_reasons(deps, [document])
    return document


async def _wait(deps: Deps, manifest: Manifest, wait_s: float, request: Request) -> None:
    """Wait until the version is ready or has failed, `wait_s` have passed, or the caller has disconnected."""
    waits = [
        asyncio.ensure_future(wait_until_ready(deps, manifest, wait_s)),
        asyncio.ensure_future(disconnected(request.receive)),
    ]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()
    if waits[0].done() and not waits[0].cancelled():
        waits[0].result()
