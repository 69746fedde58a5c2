"""Reads the JSON documents of a folder repository. A damaged document is an error that names the file."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Endpoint, Manifest
from millstream.services.repository.disk import read_file, storage_failure

#: Of a document; a larger one is damaged. A manifest has some MiB at most.
DOCUMENT_BYTES_MAX = 64 << 20
Document = TypeVar("Document", bound=BaseModel)


def content_of(document: BaseModel) -> bytes:
    """Return the bytes of a document's file.

    Fields with their defaults are left out: an earlier release, which may run beside this one, refuses those that it
    does not know.
    """
    return document.model_dump_json(indent=2, exclude_defaults=True).encode() + b"\n"


def read_document(path: Path, kind: type[Document], root: Path) -> Document | None:
    """Return the document at `path`; None if there is none. Raises Failure(INTERNAL) when it is damaged."""
    try:
        content = read_file(path, DOCUMENT_BYTES_MAX)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        raise damaged(path, "it is no file") from None
    except ValueError as error:
        raise damaged(path, str(error)) from None
    except OSError as error:
        raise storage_failure(error, root) from error
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise damaged(path, ".".join(map(str, problem["loc"])) + f" {problem['msg']}".strip()) from error


def read_manifest(path: Path, model: str, version: int, root: Path) -> Manifest | None:
    """Return the manifest at `path`; None if there is none. Raises Failure(INTERNAL) if it is of another version."""
    manifest = read_document(path, Manifest, root)
    if manifest is not None and (manifest.model, manifest.version) != (model, version):
        raise damaged(path, f"it describes version {manifest.version} of {manifest.model!r}")
    return manifest


def read_endpoint(path: Path, model: str, root: Path) -> Endpoint | None:
    """Return the endpoint at `path`; None if there is none. Raises Failure(INTERNAL) if it is of another model."""
    endpoint = read_document(path, Endpoint, root)
    if endpoint is not None and endpoint.model != model:
        raise damaged(path, f"it describes {endpoint.model!r}")
    return endpoint


def damaged(path: Path, reason: str) -> Failure:
    """Return the failure for a damaged document."""
    return Failure(Code.INTERNAL, f"{path} is damaged: {reason}; restore it from a backup, or delete it")
