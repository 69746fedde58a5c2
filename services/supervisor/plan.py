"""Which processes an installation consists of: settings -> programs. Pure.

Settings + what the machine has -> Plan: redis?, gateways, workers of each pool
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from millstream.services.errors import Failure, invalid
from millstream.services.installation import shm_prefix
from millstream.services.model.names import check_name
from millstream.services.settings import ADMIN_KEY, Settings

WORKERS_MAX = 1024
DRAIN_SHARE = 0.9  # of the time that an installation may take to stop: what one of its processes may
_DEVICES = {"gpu": "cuda", "tensorrt": "tensorrt"}


@dataclass(frozen=True, slots=True)
class Program:
    """A child to run. `environment`: what it gets on top of this process's, without the variables in `withheld`.

    `worker`: it has an id (millstream.services.wire.worker_id). `says_ready`: it takes `--ready-fd N` and writes a line there when it
    is. `cores`: the only ones it may use; empty: any.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    withheld: frozenset[str] = frozenset({ADMIN_KEY})
    fds: tuple[int, ...] = ()
    worker: bool = False
    says_ready: bool = False
    cores: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Entry:
    """How a gateway and a worker are started, before their own arguments.

    `-P`: the user's folder is not searched for modules, whatever its folders are called.
    """

    gateway: tuple[str, ...] = (sys.executable, "-P", "-m", "millstream.gateway")
    worker: tuple[str, ...] = (sys.executable, "-P", "-m", "millstream.workers")


def parse_pools(text: str) -> dict[str, int]:
    """`cpu=2,gpu=1` -> workers by pool name. Raises Failure(INVALID)."""
    pools: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, number = part.partition("=")
        try:
            workers = int(number)
            check_name(name, "pool name")
        except (ValueError, Failure):
            workers = 0
        if not equals or not 1 <= workers <= WORKERS_MAX:
            raise invalid(f"--pool {part}: write NAME=WORKERS with 1 to {WORKERS_MAX} workers, like cpu=2")
        if name == "gateway":
            raise invalid(f"--pool {part}: a pool cannot be called gateway, its logs would be the gateways'")
        if name in pools:
            raise invalid(f"--pool {part}: the pool {name} is named twice")
        pools[name] = workers
    if not pools:
        raise invalid("--pool: at least one pool is needed, like cpu=1")
    return pools


def threads_of(settings: Settings, cpus: int) -> int:
    """Threads of one worker: as set, else an equal share of the machine."""
    return settings.worker_threads or max(1, cpus // sum(parse_pools(settings.pools).values()))


def metrics_dir_of(settings: Settings) -> Path:
    """Where all processes count: in memory, since a write to a page that is going to disk waits for the disk."""
    memory = settings.shm_dir if settings.shm_dir.is_dir() else settings.home.resolve() / "run"
    return memory / f"{shm_prefix(settings)}.metrics"


#: glibc, which the server of the wheel allocates with, learns from the first large tensor to keep the room of all of
#: them. With these sizes given it does not: parts of blobs (256 KiB) go back when they are freed, all else stays at hand.
_GIVES_MEMORY_BACK = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(16 << 20)}


def environment_of(settings: Settings) -> dict[str, str]:
    """Every setting that has a value as `MILLSTREAM_…`, so that a child sees what the command line said, too."""
    environment = {}
    for name in Settings.model_fields:
        value = getattr(settings, name)
        if value is not None:
            text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
            environment[f"MILLSTREAM_{name.upper()}"] = text
    return environment


def settings_of_children(settings: Settings, *, port: int, grpc_port: int, redis_url: str, cpus: int) -> Settings:
    """The settings with what was only known at start filled in."""
    home = settings.home.resolve()
    return settings.model_copy(
        update={
            "home": home,
            "triton_repositories": ",".join(map(str, settings.triton_repository_dirs)),
            "http_port": port,
            "grpc_port": grpc_port,
            "redis_url": SecretStr(redis_url),
            "metrics_dir": metrics_dir_of(settings),
            "worker_threads": threads_of(settings, cpus),
            # On a single core whoever looks keeps the one from running that is looked for.
            "busy_poll_us_max": settings.busy_poll_us_max if cpus > 1 else 0,
            # A child that reaches its limit still has time to end by itself, and to say so.
            "drain_s": settings.drain_s * DRAIN_SHARE,
            # One port is not enough for several workers, nor for one and its replacement; the gateways show them all.
            "worker_metrics_port": 0,
        }
    )


def gateways(settings: Settings, fd: int, entry: Entry, cores: frozenset[int] = frozenset()) -> list[Program]:
    """The gateway processes; each inherits the listening socket `fd`."""
    # The gRPC library's own log lines are about connections, and each would be shown as a warning.
    environment = {"GRPC_VERBOSITY": "NONE"} | _common(settings)
    return [
        Program(
            name=f"gateway-{index}",
            command=(*entry.gateway, "--fd", str(fd), "--index", str(index)),
            environment=environment,
            withheld=frozenset(),
            fds=(fd,),
            says_ready=True,
            cores=cores,
        )
        for index in range(settings.gateways)
    ]


def workers(settings: Settings, entry: Entry, cores: frozenset[int] = frozenset()) -> list[Program]:
    """The worker processes of every pool. Pools called gpu and tensorrt run on that device, others as set."""
    return [
        Program(
            name=f"{pool}-{index}",
            command=(*entry.worker, "--pool", pool, "--index", str(index)),
            environment=_common(settings) | {"MILLSTREAM_WORKER_DEVICE": _DEVICES.get(pool, settings.worker_device)},
            worker=True,
            cores=cores,
        )
        for pool, number in parse_pools(settings.pools).items()
        for index in range(number)
    ]


def redis(command: list[str], cores: frozenset[int] = frozenset()) -> Program:
    """The embedded Redis."""
    return Program(name="redis", command=tuple(command), environment=_GIVES_MEMORY_BACK, cores=cores)


def _common(settings: Settings) -> dict[str, str]:
    # Unbuffered: what a process said before it died is what one wants to read.
    return environment_of(settings) | {"PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True)
class Running:
    """What was started, for people to read. `grpc`: HOST:PORT; None: it is off."""

    url: str
    local_url: str
    grpc: str | None
    home: Path
    redis: str
    gateways: int
    pools: Mapping[str, int]
    threads: int
