"""`millstream up`: runs a whole installation on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.client.cli.failures import usage_of
from millstream.client.cli.options import Json, load_settings
from millstream.services.extras import require
from millstream.services.process.inheritance import open_standard_descriptors
from millstream.services.process.printable import printable

if TYPE_CHECKING:
    from millstream.services.settings import Settings

Home = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder for models, logs and sockets (MILLSTREAM_HOME).")
]
Host = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Address to listen on (MILLSTREAM_HOST); default 127.0.0.1.")
]
Port = Annotated[
    int | None,
    typer.Option(metavar="PORT", help="Port to listen on, 0 for a free one (MILLSTREAM_HTTP_PORT); default 8000."),
]
GrpcPort = Annotated[
    int | None,
    typer.Option(
        metavar="PORT", help="Port for gRPC, 0 for a free one, -1 for none (MILLSTREAM_GRPC_PORT); default 8001."
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Certificate of the server with its intermediates, PEM (MILLSTREAM_TLS_CERT_FILE): HTTPS, and gRPC over "
        "TLS. Renewed files are taken without a restart. Default: no TLS.",
    ),
]
TlsKey = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Private key of the certificate, PEM (MILLSTREAM_TLS_KEY_FILE).")
]
Gateways = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Gateway processes (MILLSTREAM_GATEWAYS); default 1. 0: workers alone, for the gateways of other hosts, "
        "with their Redis (--redis) and their folder `repository` in this home.",
    ),
]
Pools = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=N[,OPTION=VALUE…]",
        help="Pool and its number of workers, can be repeated (MILLSTREAM_POOLS=cpu=2,gpu=1); default cpu=1. "
        "NAME=MIN:MAX lets the controller decide (docs/autoscaling.md). "
        "Options of its workers: device=cuda:0, device_memory=14GiB, threads=4, memory=16GiB, backend=onnxruntime. The "
        "pool gpu runs on CUDA, the pool tensorrt on TensorRT, unless they name a device.",
    ),
]
Memory = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIZE",
        help="Memory of each worker process, like 8GiB, or of each worker of a pool, like gpu=16GiB; can be repeated "
        "(MILLSTREAM_WORKER_MEMORY=cpu=8GiB,gpu=16GiB); default: an equal share of 80 % of the memory.",
    ),
]
Redis = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="External Redis or Valkey, 7.0 or newer: redis://, rediss://, unix:// or redis+sentinel:// "
        "(MILLSTREAM_REDIS_URL); default: start one. For a URL with a password use the variable: other users can "
        "see command lines.",
    ),
]
Preload = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATH",
        help="Model (file or folder) to upload at the start, can be repeated (MILLSTREAM_PRELOAD=a=a.onnx,b=b.onnx). "
        "Skipped if the same file was already uploaded.",
    ),
]
TritonRepositories = Annotated[
    list[Path] | None,
    typer.Option(
        "--triton-repository",
        "--repository",
        metavar="DIR",
        help="Triton model repository to serve in place, can be repeated (MILLSTREAM_TRITON_REPOSITORIES=a,b): "
        "DIR/NAME/1/model.onnx, with or without a config.pbtxt. Nothing is copied.",
    ),
]
Example = Annotated[
    bool | None,
    typer.Option(
        "--example/--no-example",
        help="Load the digits example (MILLSTREAM_PRELOAD=none: do not).",
        show_default="on",
    ),
]
DrainS = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        help="Longest duration of a shutdown in seconds; requests in flight are answered first (MILLSTREAM_DRAIN_S); "
        "default 30.",
    ),
]
ShmAllowClients = Annotated[
    bool | None,
    typer.Option(
        "--shm-allow-clients/--no-shm-allow-clients",
        help="Let clients on this machine pass tensors in shared memory regions that they created "
        "(MILLSTREAM_SHM_ALLOW_CLIENTS).",
        show_default="off",
    ),
]
Controller = Annotated[
    bool | None,
    typer.Option(
        "--controller/--no-controller",
        help="Run a controller, which keeps --instances-min of models (`millstream configure`), adds second instances "
        "and unloads idle models (MILLSTREAM_CONTROLLER).",
        show_default="on",
    ),
]


def up(
    home: Home = None,
    host: Host = None,
    http_port: Port = None,
    grpc_port: GrpcPort = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    gateways: Gateways = None,
    pool: Pools = None,
    memory: Memory = None,
    redis: Redis = None,
    preload: Preload = None,
    triton_repository: TritonRepositories = None,
    example: Example = None,
    drain_s: DrainS = None,
    controller: Controller = None,
    shm_allow_clients: ShmAllowClients = None,
    json_output: Json = False,
) -> None:
    """Start Redis, gateways, workers and a controller on this machine.

    Prints the line "ready http://HOST:PORT" when a first inference has been answered; with a certificate, https://.
    Processes that die are restarted. Ctrl-C and SIGTERM stop the server after answering requests in flight; a second
    signal stops it at once. SIGHUP replaces all processes one after the other, as `millstream restart` does.
    """
    open_standard_descriptors()
    from millstream.services.settings import check_platform_port, settings_class

    if controller is False and "controller" not in settings_class().model_fields:
        controller = None  # no plug-in is on that has one
    settings = load_settings(
        home=home,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        tls_cert_file=tls_cert,
        tls_key_file=tls_key,
        gateways=gateways,
        pools=",".join(pool) if pool else None,
        worker_memory=",".join(memory) if memory else None,
        redis_url=redis,
        preload=",".join(preload) if preload else None,
        triton_repositories=",".join(map(str, triton_repository)) if triton_repository else None,
        controller=controller,
        drain_s=drain_s,
        shm_allow_clients=shm_allow_clients,
    )
    if example is not None:
        models = [part for part in settings.preload.split(",") if part.strip() != "none"]
        settings = settings.model_copy(update={"preload": ",".join([*models, *([] if example else ["none"])])})
    require(*(("gateway",) if settings.gateways else ()), "worker", "cpu")
    if http_port is None:
        check_platform_port()
    raise typer.Exit(run(settings, json_output=json_output))


def run(settings: Settings, *, json_output: bool, required: bool = False) -> int:
    """Run the supervisor until it is stopped, and return the exit code.

    `required`: its models are all that it is for. It is not ready while they load, and ends if none can be served.
    """
    from millstream.services.cli.preload import preload_plan
    from millstream.services.cli.startup_view import JsonView, StartupView, TerminalView
    from millstream.services.environment import manager_environment
    from millstream.services.process.logs import descriptor_writer
    from millstream.services.process.private_files import create_files_private
    from millstream.services.supervisor.own_log import LineWriter
    from millstream.services.supervisor.service_manager import ServiceManager
    from millstream.services.supervisor.supervisor import Supervisor

    _check(settings)
    key = settings.admin_key.get_secret_value() if settings.admin_key else None
    with usage_of():
        plan = preload_plan(settings, required=required)
    lines = LineWriter(descriptor_writer(1)) if settings.log_format == "json" and not json_output else None
    view = StartupView(plan, key) if lines is not None else (JsonView if json_output else TerminalView)(plan, key)

    create_files_private()

    async def run() -> int:
        manager = ServiceManager(manager_environment())
        return await Supervisor(settings, view, forward=lines.write if lines else None, manager=manager).run()

    try:
        with usage_of():  # what the supervisor finds invalid are its settings
            return asyncio.run(run())
    finally:
        view.close()
        if lines is not None:
            lines.close()


def _check(settings: Settings) -> None:
    """Warn of variables that are no settings, and of memory that workers do not have. Raises wrong usage."""
    from millstream.services.settings import unknown_variables
    from millstream.services.supervisor.start_checks import check_start

    for unknown in unknown_variables():
        typer.echo(f"warning: {printable(unknown)}", err=True)
    with usage_of():
        if warning := check_start(settings):
            typer.echo(f"warning: {printable(warning)}", err=True)
