"""`millstream serve`: the command of a container image on a platform such as SageMaker or KServe.

Serves the models of one folder, listening on all addresses.
"""

from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.client.cli.failures import usage_of
from millstream.client.cli.options import Json, load_settings
from millstream.services.allowed_hosts import ANY
from millstream.services.cli.commands.up import run
from millstream.services.errors import Code, Failure, invalid
from millstream.services.extras import require
from millstream.services.plugin.registry import contributions
from millstream.services.process.inheritance import open_standard_descriptors

if TYPE_CHECKING:
    from millstream.services.settings import Settings

MODEL_DIR = Path("/opt/ml/model")
_HTTP_PORT = 8080

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="Triton model repository, or the folder of one model, as `push` takes it.",
    ),
]
Called = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="Name of the model in a folder of one model; default: what the platform says, or model.",
    ),
]
HttpPort = Annotated[
    int | None,
    typer.Option(
        metavar="PORT",
        help="Port to listen on; default: what the platform says, MILLSTREAM_HTTP_PORT, PORT, or 8080.",
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
    """Serve the models of one folder from a container, listening on all addresses.

    It is ready when the models are loaded that can be; if none can be, it ends with exit code 1.
    """
    open_standard_descriptors()
    require("gateway", "worker", "cpu")
    settings = load_settings()
    wanted = [serving(settings) for serving in contributions("serve", FunctionType)]
    uri = next((one.uri for one in wanted if one.uri), "")
    if folder == MODEL_DIR and uri:
        folder = storage_folder(uri)
    with usage_of():
        models, repositories = discover(folder, name or next((one.name for one in wanted if one.name), "model"))
    by_calls = any(one.by_calls for one in wanted)
    if not (models or repositories or by_calls):
        raise Failure(Code.NOT_FOUND, f"there is no model in {folder}: it is empty, or does not exist")
    found: dict[str, Any] = {"preload": ",".join(filter(None, ("none", models)))}
    if repositories:
        found["triton_repositories"] = repositories
    if "allowed_hosts" not in settings.model_fields_set:
        # The platform routes by name to the container, and does not document which names it passes on.
        found["allowed_hosts"] = ANY
    if http_port is None:
        http_port = next((one.port for one in wanted if one.port), None) or _platform_port(settings)
    host = "0.0.0.0"  # noqa: S104 - in a container, whose platform controls access
    serving = load_settings(host=host, http_port=http_port, grpc_port=grpc_port, **found)
    raise typer.Exit(run(serving, json_output=json_output, required=not by_calls))


def _platform_port(settings: Settings) -> int:
    """Return the port in MILLSTREAM_HTTP_PORT or PORT, else 8080. Raises Failure(INVALID)."""
    from millstream.services.settings import check_platform_port

    check_platform_port()
    return settings.http_port if "http_port" in settings.model_fields_set else _HTTP_PORT


def storage_folder(uri: str) -> Path:
    """Return the folder that the platform names. Raises Failure(UNSUPPORTED) for a bucket."""
    scheme, separator, path = uri.partition("://")
    if not separator:
        return Path(uri)
    if scheme != "file":
        raise Failure(
            Code.UNSUPPORTED,
            f"models are not fetched from {scheme}://, which the platform names: put them into the image under "
            f"{MODEL_DIR}, and upload the model to the platform without an address of its files",
        )
    return Path(path)


def discover(folder: Path, name: str) -> tuple[str | None, str | None]:
    """Return the models and the repositories in `folder`, in the form of the settings; None for none.

    Raises Failure(INVALID) for a folder that is neither a model nor a repository, and for several models.
    """
    from millstream.services.ingest.layout import NoModel, entries, files_of, is_repository, recognise

    if not folder.is_dir() or not (found := entries(folder)):
        return None, None
    if is_repository(folder):
        return None, str(folder)
    try:
        model = recognise(folder)
    except NoModel as failure:
        if all(entry.is_dir() for entry in found):  # models that are to come, or say why they are none
            return None, str(folder)
        raise invalid(f"{folder}: there is no model in this folder: {failure.message}") from failure
    except Failure as failure:
        raise invalid(f"{folder}: {failure.message}") from failure
    alone = files_of(model) == (str(model.path.relative_to(model.root)),)
    return f"{name}={model.path if alone else folder}", None
