"""The environment of this process: the only module that reads it, or changes it. Settings are in settings.py."""

from __future__ import annotations

import os
from pathlib import Path

ENVIRONMENT = os.environ  # noqa: TID251 - of this process: no other module reads it
ORT_DISABLE_TELEMETRY = "ORT_DISABLE_TELEMETRY"  # of ONNX Runtime
#: The commit that an image was built from, which its Dockerfile sets.
REVISION = "IMAGE_REVISION"
#: the variable in which platforms with twelve-factor conventions pass the port
PORT = "PORT"
#: what clients read beside MILLSTREAM_HOME and MILLSTREAM_ADMIN_KEY: no settings of a server (client/address.py)
CLIENT_VARIABLES = (
    "MILLSTREAM_ENDPOINT",
    "MILLSTREAM_CA_FILE",
    "MILLSTREAM_CLIENT_CERT_FILE",
    "MILLSTREAM_CLIENT_KEY_FILE",
)
#: What libraries need of the environment, by name or by what it begins with: where programs and libraries are, how to
#: compute, and the language. Nothing that holds a secret: addresses of others and their keys are not among it.
_LIBRARY_VARIABLES = frozenset(
    {
        "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "HOME",
        "GLIBC_TUNABLES", "CC", "CXX", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "XLA_FLAGS",
        "NPROC", "TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS", "JAX_PLATFORMS", "MILLSTREAM_PLUGINS",
    }
)  # fmt: skip
_LIBRARY_PREFIXES = (
    "LC_", "PYTHON", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "ORT_", "OV_", "TVM_",
    "IREE_", "TORCHINDUCTOR_", "CUDA_", "NVIDIA_", "ROCR_", "HSA_", "HIP_", "OCL_", "OPENCL_", "COVERAGE_", "COV_CORE_",
    "NIX_",
)  # fmt: skip
#: variables by which a service manager speaks with this process, and not with its children (sd_notify(3))
MANAGER_VARIABLES = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"})


def manager_environment() -> dict[str, str]:
    """Return the variables of the service manager that started this process; empty if there is none."""
    return {name: value for name, value in ENVIRONMENT.items() if name in MANAGER_VARIABLES}


def visible_gpus() -> str | None:
    """Return CUDA_VISIBLE_DEVICES, which says which GPUs CUDA numbers from 0; None: all."""
    return ENVIRONMENT.get("CUDA_VISIBLE_DEVICES")


def chosen_plugins() -> str:
    """Return MILLSTREAM_PLUGINS: which plug-ins are on (services/plugin/registry.py)."""
    return ENVIRONMENT.get("MILLSTREAM_PLUGINS", "all")


def client_variable(name: str) -> str | None:
    """Return the value of one of CLIENT_VARIABLES; empty counts as unset: compose files pass on what may be empty."""
    assert name in CLIENT_VARIABLES
    return ENVIRONMENT.get(name) or None


def revision() -> str:
    """Return the commit that this image was built from; "unknown" outside of images."""
    return ENVIRONMENT.get(REVISION) or "unknown"


def platform_port() -> int | None:
    """Return the port in `PORT`; None if there is none, or something else: clients start in any environment."""
    text = ENVIRONMENT.get(PORT, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 6 and int(text) < 1 << 16 else None


def variables_of(prefix: str) -> dict[str, str]:
    """Return the variables whose names begin with `prefix`: those of a library that a plug-in follows.

    Empty ones count as unset, and are removed: the library reads the environment itself.
    """
    found = {name: value.strip() for name, value in ENVIRONMENT.items() if name.startswith(prefix)}
    for name, value in found.items():
        if not value:
            del ENVIRONMENT[name]
    return {name: value for name, value in found.items() if value}


def user_config_file() -> Path | None:
    """Return the path of the user's configuration; None if the user has no home folder.

    Source: XDG Base Directory Specification (a relative XDG_CONFIG_HOME is ignored).
    """
    folder = Path(ENVIRONMENT.get("XDG_CONFIG_HOME", ""))
    try:
        base = folder if folder.is_absolute() else Path.home() / ".config"
    except RuntimeError:
        return None
    return base / "millstream" / "config.toml"


def disable_library_telemetry() -> None:
    """Keep ONNX Runtime from reporting models and runs over the network, unless the environment says otherwise.

    Effective only before onnxruntime is imported. Its packages report by default, and leave a device id and a
    database in ~/.cache/Microsoft. Source: onnxruntime, docs/Privacy.md and pull request 27379.
    """
    ENVIRONMENT.setdefault(ORT_DISABLE_TELEMETRY, "1")


def set_xla_threads(threads: int) -> None:
    """Set the size of XLA's thread pool in this process, unless it is set. Effective before JAX is first used."""
    ENVIRONMENT.setdefault("NPROC", str(max(1, threads)))


def library_environment(overrides: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process that reads or runs an upload: what libraries need, and `overrides`."""
    needed = {
        name: value
        for name, value in ENVIRONMENT.items()
        if name in _LIBRARY_VARIABLES or name.startswith(_LIBRARY_PREFIXES)
    }
    return {ORT_DISABLE_TELEMETRY: "1", **needed, **overrides}


def child_environment(overrides: dict[str, str], without: frozenset[str] = frozenset()) -> dict[str, str]:
    """Return the environment for a child process: ours without the names in `without`, updated with `overrides`."""
    return {name: value for name, value in {**ENVIRONMENT, **overrides}.items() if name not in without}
