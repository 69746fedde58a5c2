"""Derives the processes of an installation from its settings. Pure.

Settings + the machine's processors -> Programs: Redis (if embedded), gateways, workers of each pool
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from millstream.client.address import Trust
from millstream.services.environment import MANAGER_VARIABLES
from millstream.services.settings import ACCESS_SECRET, ADMIN_KEY, METRICS_KEY, SECRET_FILES, Settings, variables
from millstream.services.supervisor.pool_specs import PoolSpec, memory_of_pools, parse_pools
from millstream.services.wire.worker_id import slot_of, worker_name

DRAIN_SHARE = 0.9  # of the installation's drain time: how long one of its processes may take to stop


#: variables that no child gets: secrets are passed on as values, and a secret that is given twice is refused
WITHHELD = SECRET_FILES | MANAGER_VARIABLES


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run as a child.

    Args:
        environment: variables added to those of this process.
        withheld: variables of this process that the child does not get.
        fds: descriptors that the child inherits.
        worker: name of the worker in Redis, metrics and lists (wire.worker_id); "" for other programs.
        signals_ready: whether it accepts `--ready-fd N` and writes there when it is ready.
        shows_life: whether it accepts `--life-fd N` and writes a byte there every two seconds (process.sign_of_life).
        pool: of a worker.
        index: number of a worker in its pool.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    withheld: frozenset[str] = WITHHELD | {ADMIN_KEY, ACCESS_SECRET, METRICS_KEY}
    fds: tuple[int, ...] = ()
    worker: str = ""
    signals_ready: bool = False
    shows_life: bool = False
    pool: str = ""
    index: int = 0


@dataclass(frozen=True, slots=True)
class EntryCommands:
    """The commands that start a gateway and a worker, without their arguments.

    `-P` keeps Python from importing modules from the current folder.
    """

    gateway: tuple[str, ...] = (sys.executable, "-P", "-m", "millstream.gateway")
    worker: tuple[str, ...] = (sys.executable, "-P", "-m", "millstream.workers")


def threads_of_pools(settings: Settings, cpus: int) -> dict[str, int]:
    """Return the threads of one worker of each pool: as it says, or an equal share of what the others leave."""
    pools = parse_pools(settings.pools)
    taken = sum(spec.threads * spec.workers for spec in pools.values())
    sharing = sum(spec.workers for spec in pools.values() if not spec.threads)
    shared = max(1, (cpus - taken) // max(1, sharing))
    return {pool: spec.threads or shared for pool, spec in pools.items()}


#: The Redis of the wheel allocates with glibc, which raises its mmap threshold after the first large tensor and then
#: keeps freed memory. Fixed thresholds prevent that: freed parts of blobs (256 KiB) are returned, smaller blocks kept.
_GIVES_MEMORY_BACK = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(16 << 20)}


def environment_of(settings: Settings) -> dict[str, str]:
    """Return every setting with a value as `MILLSTREAM_…`, so that children also get those of the command line."""
    environment = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if value is not None:
            text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
            environment[variables()[name]] = text
    return environment


def settings_of_children(settings: Settings, *, port: int, grpc_port: int, redis_url: str) -> Settings:
    """Return the settings for children, with the values that are only known at start."""
    home = settings.home.resolve()
    return settings.model_copy(
        update={
            "home": home,
            **_absolute_files(settings),
            "http_port": port,
            "grpc_port": grpc_port,
            "redis_url": SecretStr(redis_url),
            "worker_memory": memory_of_pools(settings.pools, settings.worker_memory),
            # Leaves a child that reaches its limit time to report that and end by itself.
            "drain_s": settings.drain_s * DRAIN_SHARE,
            # Several workers, or a worker and its replacement, cannot share a port; gateways serve all their metrics.
            "metrics_port": 0,
        }
    )


def _absolute_files(settings: Settings) -> dict[str, Path]:
    """Return the files of certificates, which may be named relative to the folder that the user is in."""
    names = ("tls_cert_file", "tls_key_file", "tls_client_ca_file")
    return {name: path.expanduser().absolute() for name in names if (path := getattr(settings, name)) is not None}


def gateways(settings: Settings, fd: int, preload_fd: int, entry: EntryCommands) -> list[Program]:
    """Return the gateway processes; each inherits the listening socket `fd` and the pipe `preload_fd`."""
    # The gRPC library logs single connections, and each line would appear as a warning.
    environment = {"GRPC_VERBOSITY": "NONE"} | _common(settings)
    return [
        Program(
            name=f"gateway-{index}",
            command=(*entry.gateway, "--fd", str(fd), "--preload-fd", str(preload_fd), "--index", str(index)),
            environment=environment,
            withheld=WITHHELD,
            fds=(fd, preload_fd),
            signals_ready=True,
            shows_life=True,
        )
        for index in range(settings.gateways)
    ]


def workers(settings: Settings, entry: EntryCommands, cpus: int, host: str = "") -> list[Program]:
    """Return the worker processes of all pools at the start. `host`: as for `worker`."""
    return [
        worker(settings, entry, cpus, pool, index, host)
        for pool, spec in parse_pools(settings.pools).items()
        for index in range(spec.initial)
    ]


def worker(settings: Settings, entry: EntryCommands, cpus: int, pool: str, index: int, host: str = "") -> Program:
    """Return one worker process of a pool.

    `host`: the name of this host where other hosts may have workers of the pool, else "". The process and its log are
    named without it.
    """
    spec, threads = parse_pools(settings.pools)[pool], threads_of_pools(settings, cpus)[pool]
    slot = slot_of(index, host)
    return Program(
        name=worker_name(pool, str(index)),
        command=(*entry.worker, "--pool", pool, "--index", slot, *_options(spec, threads)),
        environment=_common(settings),
        worker=worker_name(pool, slot),
        shows_life=True,
        pool=pool,
        index=index,
    )


def _options(spec: PoolSpec, threads: int) -> tuple[str, ...]:
    """Return the options of a pool's workers on their command line."""
    backend = ("--backend", spec.backend) if spec.backend else ()
    return ("--device", spec.device, "--threads", str(threads), *backend)


def redis(command: list[str]) -> Program:
    """Return the embedded Redis."""
    return Program(name="redis", command=tuple(command), environment=_GIVES_MEMORY_BACK)


def _common(settings: Settings) -> dict[str, str]:
    # Unbuffered: the last lines before a death must not be lost.
    return environment_of(settings) | {"PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True)
class Running:
    """What is running, for display and for calls to it.

    Args:
        url: of the gateways; "" if there are none, like `local_url`.
        grpc: HOST:PORT, with TLS grpcs://HOST:PORT; None: there is no gRPC.
        trust: how to call `local_url` over TLS.
        threads: of each worker, by pool.
    """

    url: str
    local_url: str
    trust: Trust
    grpc: str | None
    home: Path
    redis: str
    gateways: int
    pools: Mapping[str, PoolSpec]
    threads: Mapping[str, int]

    @property
    def serves(self) -> str:
        """What serves, for people: the URL of gateways, else workers."""
        workers = sum(spec.initial for spec in self.pools.values())
        return self.url or ("1 worker" if workers == 1 else f"{workers} workers")
