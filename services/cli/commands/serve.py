"""`millstream serve`: the command of a container image on a platform such as SageMaker or KServe.

Serves the models of one folder, listening on all addresses.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.services.allowed_hosts import ANY
from millstream.services.cli.commands.up import up
from millstream.services.cli.options import Json, load_settings
from millstream.services.errors import Code, Failure

if TYPE_CHECKING:
    from millstream.services.settings import Settings

MODEL_DIR = Path("/opt/ml/model")
_HTTP_PORT = 8080

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Triton model repository, or a folder that contains one ONNX file.")
]
Called = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="Name of the model in a folder with one ONNX file (MILLSTREAM_SAGEMAKER_MODEL); default: model.",
    ),
]
HttpPort = Annotated[
    int | None,
    typer.Option(
        metavar="PORT",
        help="Port to listen on (MILLSTREAM_SAGEMAKER_PORT, SAGEMAKER_BIND_TO_PORT, MILLSTREAM_HTTP_PORT, PORT); "
        "default 8080.",
    ),
]
GrpcPort = Annotated[
    int | None, typer.Option(metavar="PORT", help="Port for gRPC, -1 for none (MILLSTREAM_GRPC_PORT); default 8001.")
]


def serve(
    folder: Folder = MODEL_DIR,
    name: Called = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    json_output: Json = False,
) -> None:
    """Serve the models of one folder from a container, listening on all addresses."""
    settings = load_settings()
    if "allowed_hosts" not in settings.model_fields_set:
        # The platform routes by name to the container, and does not document which names it passes on.
        os.environ["MILLSTREAM_ALLOWED_HOSTS"] = ANY  # noqa: TID251 - for `up`, which reads it
    if folder == MODEL_DIR and settings.vertex_storage_uri:
        folder = storage_folder(settings.vertex_storage_uri)
    models, repositories = discover(folder, name or settings.sagemaker_model or "model")
    if http_port is None:
        http_port = settings.sagemaker_port or settings.vertex_http_port or _platform_port(settings)
    up(
        host="0.0.0.0",  # noqa: S104 - in a container, whose platform controls access
        http_port=http_port,
        grpc_port=grpc_port,
        preload=models,
        triton_repository=repositories,
        example=False,
        json_output=json_output,
    )


def _platform_port(settings: Settings) -> int:
    """Return the port in MILLSTREAM_HTTP_PORT or PORT, else 8080. Raises Failure(INVALID)."""
    from millstream.services.settings import check_platform_port

    check_platform_port()
    return settings.http_port if "http_port" in settings.model_fields_set else _HTTP_PORT


def storage_folder(uri: str) -> Path:
    """Return the folder that AIP_STORAGE_URI names. Raises Failure(UNSUPPORTED) for a bucket."""
    scheme, separator, path = uri.partition("://")
    if not separator:
        return Path(uri)
    if scheme != "file":
        raise Failure(
            Code.UNSUPPORTED,
            f"AIP_STORAGE_URI: models are not fetched from {scheme}://: put them into the image under {MODEL_DIR}, and "
            "upload the model to Vertex AI without an artifact URI",
        )
    return Path(path)


def discover(folder: Path, name: str) -> tuple[list[str] | None, list[Path] | None]:
    """Return the models and the repositories in `folder`, in the form of `up`'s arguments; None for none."""
    files = sorted(folder.glob("*.onnx"))
    if files:
        return [f"{name}={files[0]}"], None
    return None, [folder] if folder.is_dir() and any(folder.iterdir()) else None
