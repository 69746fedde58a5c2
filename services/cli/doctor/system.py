"""Checks of what the operating system grants: shared memory, disk, files, processes, ports."""

from __future__ import annotations

import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.services.cli.doctor.check import Check
from millstream.services.errors import Failure

if TYPE_CHECKING:
    from millstream.services.settings import Settings

MIB = 1 << 20
#: files that a gateway opens besides its connections
_OTHER_FILES = 256
#: An upload is written beside what is there, and again when it is imported.
DISK_FREE_BYTES_MIN = 1 << 30
#: threads and processes of a gateway or worker at load, the sandboxed checks of models included
_TASKS_OF_PROCESS = 64
_PIDS = Path("/sys/fs/cgroup")


def system_checks(settings: Settings) -> list[Check]:
    """Return the checks of limits and folders, and of the ports unless the installation in this home has them."""
    checks = [_processes(settings, _PIDS), _disk(settings)]
    if not settings.gateways:
        return checks
    return [_shared_memory(settings), _files(settings), *checks, *_ports(settings)]


def _shared_memory(settings: Settings) -> Check:
    folder = settings.shm_dir
    required = settings.gateways * settings.shm_bytes_max
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("Shared memory", "warn", f"{folder}: {error.strerror}", "set MILLSTREAM_SHM_DIR")
    detail = f"{free // MIB} MiB free in {folder}, {required // MIB} MiB required"
    if free < required:
        advice = "large tensors will go through Redis: docker run --shm-size=1g, or lower MILLSTREAM_SHM_BYTES_MAX"
        return Check("Shared memory", "warn", detail, advice)
    return Check("Shared memory", "ok", detail)


def _files(settings: Settings) -> Check:
    required = settings.client_connections_max + _OTHER_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    detail = f"{allowed} allowed, {required} required for {settings.client_connections_max} connections"
    if hard != resource.RLIM_INFINITY and hard < required:
        advice = f"ulimit -Hn {required}, or lower MILLSTREAM_CLIENT_CONNECTIONS_MAX"
        return Check("Open files", "warn", detail, advice)
    return Check("Open files", "ok", detail)


def _processes(settings: Settings, cgroup: Path) -> Check:
    """Check how many tasks, which are threads and processes, this user and this control group may have."""
    from millstream.services.supervisor.pool_specs import parse_pools

    workers = sum(spec.workers for spec in parse_pools(settings.pools).values())
    required = (settings.gateways + workers) * _TASKS_OF_PROCESS
    limits = {"ulimit -u": resource.getrlimit(resource.RLIMIT_NPROC)[0], "pids.max": _pids_left(cgroup)}
    known = {name: limit for name, limit in limits.items() if limit is not None and limit >= 0}
    if not known:
        return Check("Processes", "ok", "no limit")
    name = min(known, key=known.__getitem__)
    detail = f"{known[name]} allowed by {name}, up to {required} threads for {settings.gateways + workers} processes"
    if known[name] < required:
        advice = "loads and model checks may fail: raise it (TasksMax= of systemd, docker run --pids-limit)"
        return Check("Processes", "warn", detail, advice)
    return Check("Processes", "ok", detail)


def _pids_left(root: Path) -> int | None:
    """Return how many more tasks the control group of this process may have; None: any number, or it is not known."""
    with suppress(OSError, ValueError, StopIteration):
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        folder = next(one for one in (root / own, root) if (one / "pids.max").exists())
        return int((folder / "pids.max").read_text()) - int((folder / "pids.current").read_text())
    return None


def _disk(settings: Settings) -> Check:
    home = settings.home.expanduser().absolute()
    folder = next(one for one in (home, *home.parents) if one.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        advice = "name a folder that you may write to: --home DIR or MILLSTREAM_HOME"
        return Check("Disk", "fail", f"{folder} cannot be written to", advice)
    free = shutil.disk_usage(folder).free
    nodes = os.statvfs(folder)
    detail = f"{free // MIB} MiB free for {home}"
    if free < DISK_FREE_BYTES_MIN:
        advice = (
            f"uploads need room beside what is there, {DISK_FREE_BYTES_MIN // MIB} MiB at least: free some, or --home"
        )
        return Check("Disk", "warn", detail, advice)
    if nodes.f_files and not nodes.f_favail:
        return Check("Disk", "warn", f"{detail}, but no inode is free", "delete files, or choose another --home")
    return Check("Disk", "ok", detail)


def _ports(settings: Settings) -> list[Check]:
    """Check that the ports are free; nothing if an installation runs in this home, which has them."""
    from millstream.services.supervisor.listener import listen, reserve
    from millstream.services.supervisor.lock import read_holder

    holder = read_holder(settings.home.expanduser() / "run").get("pid")
    if holder is not None and Path(f"/proc/{holder}").exists():
        return []
    found = []
    for port, take in ((settings.http_port, listen), (settings.grpc_port, reserve)):
        if port <= 0:
            continue  # any free one, or none
        try:
            take(settings.host, port).close()
        except Failure as failure:
            found.append(
                Check(f"Port {port}", "warn", failure.message, "`millstream up` with these settings will fail")
            )
        else:
            found.append(Check(f"Port {port}", "ok", f"free on {settings.host}"))
    return found
