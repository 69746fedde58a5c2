"""Checks of this machine: what is installed, the kernel, memory, disk, limits, ports, and the certificate."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from millstream.services.errors import Failure
from millstream.services.extras import extras, missing_modules, require
from millstream.services.plugin.registry import missing_requirements

if TYPE_CHECKING:
    from millstream.services.settings import Settings

State = Literal["ok", "warn", "fail"]

MIB = 1 << 20
_PYTHON_MIN = (3, 11)
#: files that a gateway opens besides its connections
_OTHER_FILES = 256
#: An upload is written beside what is there, and again when it is imported.
DISK_FREE_BYTES_MIN = 1 << 30
#: threads and processes of a gateway or worker at load, the sandboxed checks of models included
_TASKS_OF_PROCESS = 64
_CGROUP = Path("/sys/fs/cgroup")
#: days before the end from which the alert MillstreamCertificateExpires fires
_DAYS_LEFT_MIN = 14
_SECONDS_OF_DAY = 86400
_UPLOADERS = {"never": "nobody", "admin": "callers with the scope admin", "writers": "all who may upload models"}


class Check(NamedTuple):
    """The result of one check. State "fail": Millstream does not work. `advice`: what to do; may be empty."""

    name: str
    state: State
    detail: str
    advice: str = ""


def judged(name: str, detail: str, advice: str, *, wrong: bool, state: State = "warn") -> Check:
    """Return a check: ok, or in `state` with the advice if something is wrong."""
    return Check(name, state, detail, advice) if wrong else Check(name, "ok", detail)


def machine_checks(settings: Settings) -> list[Check]:
    """Return the checks of this machine, in display order. Ports are left out while the installation here has them."""
    found = [_python(), _packages(), *_plugins(), _runtime(), *_devices(settings)]
    if settings.gateways:
        found += [_shared_memory(settings), _files(settings), *_ports(settings)]
    found += [_processes(settings, _CGROUP), _disk(settings), _uploads(settings), *_sandbox()]
    return [*found, *certificate_checks(settings)]


def _python() -> Check:
    detail = f"{platform.python_version()} on {platform.machine()}"
    advice = f"install Python {'.'.join(map(str, _PYTHON_MIN))} or newer"
    return judged("Python", detail, advice, wrong=sys.version_info < _PYTHON_MIN, state="fail")


def _packages() -> Check:
    installed = ", ".join(extra for extra in extras() if extra != "cpu" and not missing_modules(extra))
    try:
        require("gateway", "worker")
    except Failure as failure:
        return Check("Packages", "fail", f"only {installed}", failure.message)
    return Check("Packages", "ok", installed)


def _plugins() -> list[Check]:
    return [
        Check("Plug-ins", "warn", f"{name} is off, it lacks {', '.join(missing)}", f"install them, or leave {name} off")
        for name, missing in missing_requirements().items()
    ]


def _runtime() -> Check:
    from importlib.metadata import PackageNotFoundError, version

    installed = []
    for name in ("onnxruntime", "onnxruntime-gpu"):
        with suppress(PackageNotFoundError):
            installed.append(f"{name} {version(name)}")
    packages = ", ".join(installed)
    if not installed:
        return Check("ONNX Runtime", "fail", "not installed", "pip install 'millstream[cpu]' (or millstream[gpu])")
    advice = "these two overwrite each other: uninstall both, install one"
    return judged("ONNX Runtime", packages, advice, wrong=len(installed) > 1)


def _devices(settings: Settings) -> list[Check]:
    """Describe the processors and, if a pool or the settings name one, the GPUs that workers run on."""
    from millstream.services.device import find_device
    from millstream.services.supervisor.pool_specs import parse_pools

    cpu = find_device("cpu")
    features = ", ".join(cpu.features) or "no vector instructions that are known"
    memory = f"{cpu.memory_bytes / (1 << 30):.1f} GiB"
    checks = [Check("Processor", "ok", f"{cpu.cores:g} cores of {cpu.name}, {memory} of memory; {features}")]
    names = {spec.device for spec in parse_pools(settings.pools).values()}
    for name in sorted(names - {"cpu"}):
        gpu = find_device(name)
        detail = f"{name}: {gpu.name}, {gpu.memory_bytes >> 30} GiB, compute capability {gpu.compute_capability}"
        if not gpu.name:
            detail = f"{name} is not known to the driver"
        checks.append(judged("GPU", detail, "install the NVIDIA driver", wrong=not gpu.name))
    return checks


def _shared_memory(settings: Settings) -> Check:
    folder, required = settings.shm_dir, settings.gateways * settings.shm_bytes_max
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("Shared memory", "warn", f"{folder}: {error.strerror}", "set MILLSTREAM_SHM_DIR")
    detail = f"{free // MIB} MiB free in {folder}, {required // MIB} MiB required"
    advice = "large tensors will go through Redis: docker run --shm-size=1g, or lower MILLSTREAM_SHM_BYTES_MAX"
    return judged("Shared memory", detail, advice, wrong=free < required)


def _files(settings: Settings) -> Check:
    required = settings.client_connections_max + _OTHER_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    detail = f"{allowed} allowed, {required} required for {settings.client_connections_max} connections"
    advice = f"ulimit -Hn {required}, or lower MILLSTREAM_CLIENT_CONNECTIONS_MAX"
    return judged("Open files", detail, advice, wrong=hard != resource.RLIM_INFINITY and hard < required)


def _ports(settings: Settings) -> list[Check]:
    """Check that the ports are free; nothing if an installation runs in this home, which has them."""
    from millstream.services.supervisor.listener import listen, reserve
    from millstream.services.supervisor.lock import read_holder

    holder = read_holder(settings.home.expanduser() / "run").get("pid")
    if holder is not None and Path(f"/proc/{holder}").exists():
        return []
    found = []
    for port, take in ((settings.http_port, listen), (settings.grpc_port, reserve)):
        if port <= 0 or (take is reserve and settings.grpc_on_http_port):
            continue  # any free one, or none
        try:
            take(settings.host, port).close()
        except Failure as failure:
            advice = "`millstream up` with these settings will fail"
            found.append(Check(f"Port {port}", "warn", failure.message, advice))
        else:
            found.append(Check(f"Port {port}", "ok", f"free on {settings.host}"))
    return found


def _processes(settings: Settings, cgroup: Path) -> Check:
    """Check how many tasks, which are threads and processes, this user and this control group may have."""
    from millstream.services.supervisor.pool_specs import parse_pools

    processes = settings.gateways + sum(spec.workers for spec in parse_pools(settings.pools).values())
    required = processes * _TASKS_OF_PROCESS
    limits = {"ulimit -u": resource.getrlimit(resource.RLIMIT_NPROC)[0], "pids.max": _pids_left(cgroup)}
    known = {name: limit for name, limit in limits.items() if limit is not None and limit >= 0}
    if not known:
        return Check("Processes", "ok", "no limit")
    name = min(known, key=known.__getitem__)
    detail = f"{known[name]} allowed by {name}, up to {required} threads for {processes} processes"
    advice = "loads and model checks may fail: raise it (TasksMax= of systemd, docker run --pids-limit)"
    return judged("Processes", detail, advice, wrong=known[name] < required)


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
    free, nodes = shutil.disk_usage(folder).free, os.statvfs(folder)
    detail = f"{free // MIB} MiB free for {home}"
    if free < DISK_FREE_BYTES_MIN:
        advice = f"uploads need {DISK_FREE_BYTES_MIN // MIB} MiB beside what is there: free some, or --home"
        return Check("Disk", "warn", detail, advice)
    full = bool(nodes.f_files and not nodes.f_favail)
    detail += ", but no inode is free" * full
    return judged("Disk", detail, "delete files, or choose another --home", wrong=full)


def _uploads(settings: Settings) -> Check:
    who = f"{_UPLOADERS[settings.import_code]} may upload pickles and code"
    return Check("Uploads", "ok", f"{who} (MILLSTREAM_IMPORT_CODE={settings.import_code})")


def _sandbox() -> list[Check]:
    """Return the checks of the layers that confine what reads or runs uploads."""
    from millstream.services.sandbox.confine import probe

    try:
        layers = probe()
    except OSError as error:
        advice = "model checks do not work, so models cannot be uploaded"
        return [Check("Sandbox", "fail", f"cannot be set up: {error.strerror}", advice)]
    refused = "uploads that may execute code, such as pickles, are refused (MILLSTREAM_UNCONFINED_IMPORTS)"
    files = Check("Landlock", "ok", f"version {layers.landlock}: an upload's process can read only its own files")
    if layers.namespaces:
        detail = "not available; namespaces take its place: an upload's process sees only its own files"
        files = Check("Landlock", "ok", detail)
    elif not layers.landlock:
        advice = f"{refused}, and any could read other files: use Linux 5.13 or newer with lsm=landlock, or allow user "
        files = Check("Landlock", "warn", "not available, nor are namespaces", f"{advice}namespaces")
    calls = Check("seccomp", "ok", "an upload's process cannot use the network or start processes")
    if not layers.seccomp:
        advice = f"{refused}, and any could use the network: use Linux with seccomp filters, on x86-64 or 64-bit ARM"
        calls = Check("seccomp", "warn", "not available", advice)
    return [files, calls]


def certificate_checks(settings: Settings) -> list[Check]:
    """Return the checks of the certificate that listeners have: files, dates, mode; nothing if they have none."""
    from millstream.services.tls.files import TlsFiles
    from millstream.services.tls.identity import load_identity

    try:
        files = TlsFiles.of(settings)
        if files is None:
            return []
        identity = load_identity(files)
    except Failure as failure:
        advice = "a gateway that runs keeps its certificate; none would start"
        return [Check("Certificate", "fail", failure.message, advice)]
    now, ends = time.time(), identity.validity.ends  # noqa: TID251 - certificates have dates
    days = int((ends - now) // _SECONDS_OF_DAY)
    detail = f"{files.certificate} fits its key{', clients need one of theirs' if files.client_ca else ''}, "
    detail += f"expires on {time.strftime('%Y-%m-%d', time.gmtime(ends))}, in {days} days"
    advice = "renew it: gateways read the new files without a restart"
    if identity.expired(now):
        detail, advice = f"{detail}: it has expired", "clients refuse it: renew it"
    elif identity.premature(now):
        detail, advice = f"{detail}, and is not valid yet", "clients refuse it: check this machine's clock"
    found = [judged("Certificate", detail, advice, wrong=days < _DAYS_LEFT_MIN or identity.premature(now))]
    if files.key.stat().st_mode & stat.S_IROTH:
        advice = f"who has it can pretend to be this server: chmod o-r {files.key}"
        found.append(Check("Private key", "warn", f"all users may read {files.key}", advice))
    return found
