"""`millstream serve`: what an image does where others start it, as SageMaker and KServe do: one folder, all addresses."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from millstream.services.cli.commands.up import up
from millstream.services.cli.options import load_settings

MODEL_DIR = Path("/opt/ml/model")
_HTTP_PORT = 8080

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A Triton model repository, or a folder with one ONNX file in it.")
]
Called = Annotated[
    str | None,
    typer.Option(
        "--name", metavar="NAME", help="Name of a single file's model (MILLSTREAM_SAGEMAKER_MODEL); default model."
    ),
]
HttpPort = Annotated[
    int | None,
    typer.Option(
        metavar="PORT", help="Port to listen on (MILLSTREAM_SAGEMAKER_PORT, SAGEMAKER_BIND_TO_PORT); default 8080."
    ),
]
GrpcPort = Annotated[
    int | None, typer.Option(metavar="PORT", help="Port for gRPC, -1 for none (MILLSTREAM_GRPC_PORT); default 8001.")
]


def serve(
    folder: Folder = MODEL_DIR, name: Called = None, http_port: HttpPort = None, grpc_port: GrpcPort = None
) -> None:
    """Start everything in a container: serve the models of one folder to all addresses.

    Without MILLSTREAM_ADMIN_KEY the admin API has a key that nobody knows.
    """
    settings = load_settings()
    if settings.admin_key is None:
        os.environ["MILLSTREAM_ADMIN_KEY"] = secrets.token_urlsafe(32)
    models, repositories = found(folder, name or settings.sagemaker_model or "model")
    if http_port is None:
        http_port = settings.sagemaker_port or _HTTP_PORT
    up(
        host="0.0.0.0",  # noqa: S104 - of a container, what its platform lets through
        http_port=http_port,
        grpc_port=grpc_port,
        preload=models,
        triton_repository=repositories,
        example=False,
    )


def found(folder: Path, name: str) -> tuple[list[str] | None, list[Path] | None]:
    """The models, as `up` takes them, and the repositories, of what lies in `folder`."""
    files = sorted(folder.glob("*.onnx"))
    if files:
        return [f"{name}={files[0]}"], None
    return None, [folder] if folder.is_dir() and any(folder.iterdir()) else None
