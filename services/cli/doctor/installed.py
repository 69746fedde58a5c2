"""Checks of what is installed here: Python, packages, ONNX Runtime, devices, and the kernel's sandbox features."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING

from millstream.services.cli.doctor.check import Check, State
from millstream.services.errors import Failure
from millstream.services.extras import extras, missing_modules, require

if TYPE_CHECKING:
    from millstream.services.settings import Settings

_PYTHON_MIN = (3, 11)


def installed_checks(settings: Settings) -> list[Check]:
    """Return the checks of Python, packages and devices."""
    return [*_python(), _packages(), *_runtime(), *_device(settings)]


def _python() -> list[Check]:
    state: State = "ok" if sys.version_info >= _PYTHON_MIN else "fail"
    required = ".".join(map(str, _PYTHON_MIN))
    detail = f"{platform.python_version()} on {platform.machine()}"
    return [Check("Python", state, detail, "" if state == "ok" else f"install Python {required} or newer")]


def _packages() -> Check:
    installed = [extra for extra in extras() if extra != "cpu" and not missing_modules(extra)]
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
    from millstream.services.device import find_device
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


def uploads_check(settings: Settings) -> Check:
    """Return who may upload what can execute code."""
    who = {
        "never": "nobody may upload pickles or code",
        "admin": "callers with the scope admin may upload pickles and code",
        "writers": "all who may upload models may upload pickles and code",
    }
    return Check("Uploads", "ok", f"{who[settings.import_code]} (MILLSTREAM_IMPORT_CODE={settings.import_code})")


def sandbox_checks() -> list[Check]:
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
