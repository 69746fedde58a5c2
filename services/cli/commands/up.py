"""`millstream up`: everything on this machine, in one command."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from millstream.services.cli.options import Json, load_settings

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
Gateways = Annotated[int | None, typer.Option(metavar="N", help="Gateway processes (MILLSTREAM_GATEWAYS); default 1.")]
Pools = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=N",
        help="A pool and its workers, can be repeated (MILLSTREAM_POOLS=cpu=2,gpu=1); default cpu=1. "
        "A pool called gpu runs on CUDA.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", help="Threads of each worker (MILLSTREAM_THREADS); default: its share of the machine."),
]
Redis = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Redis or Valkey 7.0 or newer to use: redis://, rediss://, unix:// or redis+sentinel:// "
        "(MILLSTREAM_REDIS_URL); default: one is started. Prefer the variable for a URL with a password: others can see command lines.",
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATH",
        help="A model to load, can be repeated (MILLSTREAM_MODELS=a=a.onnx,b=b.onnx). It is pushed, unless the same "
        "file is there already.",
    ),
]
Repositories = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR",
        help="A Triton model repository to serve in place, can be repeated (MILLSTREAM_REPOSITORY=a,b): "
        "DIR/NAME/1/model.onnx, with or without a config.pbtxt. Nothing is copied.",
    ),
]
Example = Annotated[
    bool | None,
    typer.Option("--example/--no-example", help="Load the digits example (MILLSTREAM_EXAMPLE).", show_default="on"),
]
DrainSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        help="How long it may take to stop: what was accepted is answered first (MILLSTREAM_DRAIN_S); default 30.",
    ),
]
CpuAffinity = Annotated[
    bool | None,
    typer.Option(
        "--cpu-affinity/--no-cpu-affinity",
        help="On a machine of two cores, keep the embedded Redis and the gateway on one each (MILLSTREAM_CPU_AFFINITY).",
        show_default="on",
    ),
]
AllowClientShm = Annotated[
    bool | None,
    typer.Option(
        "--allow-client-shm/--no-allow-client-shm",
        help="Let clients on this machine pass tensors in shared memory that they made (MILLSTREAM_ALLOW_CLIENT_SHM).",
        show_default="off",
    ),
]
TraceConfig = Annotated[
    list[str] | None,
    typer.Option(
        "--trace-config",
        metavar="KEY=VALUE",
        help="A trace setting from the start on, can be repeated: level=TIMESTAMPS, rate=100, count=10, log-frequency=50 "
        "(MILLSTREAM_TRACE=a=b,c=d). Clients may change them later.",
    ),
]


def up(
    home: Home = None,
    host: Host = None,
    http_port: Port = None,
    grpc_port: GrpcPort = None,
    gateways: Gateways = None,
    pool: Pools = None,
    threads: Threads = None,
    redis: Redis = None,
    model: Models = None,
    repository: Repositories = None,
    example: Example = None,
    drain_seconds: DrainSeconds = None,
    cpu_affinity: CpuAffinity = None,
    allow_client_shm: AllowClientShm = None,
    trace_config: TraceConfig = None,
    json_output: Json = False,
) -> None:
    """Start everything on this machine: Redis, gateways and workers.

    Prints "ready http://HOST:PORT" on a line of its own when an inference has come back. What dies is started
    again. Ctrl-C and SIGTERM answer what is on its way, then stop; a second time stops at once. SIGHUP replaces all
    processes, one after the other, as `millstream restart` does.
    """
    settings = load_settings(
        home=home,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        gateways=gateways,
        pools=",".join(pool) if pool else None,
        threads=threads,
        redis_url=redis,
        models=",".join(model) if model else None,
        repository=",".join(map(str, repository)) if repository else None,
        example=example,
        drain_s=drain_seconds,
        cpu_affinity=cpu_affinity,
        allow_client_shm=allow_client_shm,
        trace=",".join(trace_config) if trace_config else None,
    )
    from millstream.services.cli.preload import preloads
    from millstream.services.cli.repositories import PreloadPlan, repositories
    from millstream.services.cli.startup_view import Lines, Terminal
    from millstream.services.process.private_files import create_files_private
    from millstream.services.supervisor.supervisor import Supervisor

    key = settings.admin_key.get_secret_value() if settings.admin_key else None
    wanted = PreloadPlan(preloads(settings.models, example=settings.example), repositories(settings.repository_dirs))
    front = Lines(wanted, key) if json_output else Terminal(wanted, key)

    create_files_private()

    async def run() -> int:
        return await Supervisor(settings, front).run()

    raise typer.Exit(asyncio.run(run()))
