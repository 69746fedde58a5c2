"""The JSON documents of a folder repository: read whole or not at all, and what is damaged is named."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Endpoint, Manifest
from millstream.services.repository.disk import storage_failure

Document = TypeVar("Document", bound=BaseModel)


def content_of(document: BaseModel) -> bytes:
    """A document as it is written."""
    return document.model_dump_json(indent=2).encode() + b"\n"


def read_document(path: Path, kind: type[Document], root: Path) -> Document | None:
    """The document at `path`, None if there is none. Raises Failure(INTERNAL) when it is damaged."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise storage_failure(error, root) from error
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise damaged(path, ".".join(map(str, problem["loc"])) + f" {problem['msg']}".strip()) from error


def read_manifest(path: Path, model: str, version: int, root: Path) -> Manifest | None:
    """The manifest at `path`, which must be that of this version. Raises Failure(INTERNAL) when it is not."""
    manifest = read_document(path, Manifest, root)
    if manifest is not None and (manifest.model, manifest.version) != (model, version):
        raise damaged(path, f"it describes version {manifest.version} of {manifest.model!r}")
    return manifest


def read_endpoint(path: Path, model: str, root: Path) -> Endpoint | None:
    """The endpoint at `path`, which must be that of this model. Raises Failure(INTERNAL) when it is not."""
    endpoint = read_document(path, Endpoint, root)
    if endpoint is not None and endpoint.model != model:
        raise damaged(path, f"it describes {endpoint.model!r}")
    return endpoint


def damaged(path: Path, reason: str) -> Failure:
    return Failure(Code.INTERNAL, f"{path} is damaged: {reason}; restore it from a backup, or delete it")
