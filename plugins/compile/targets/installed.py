"""Which libraries of targets are installed, by their metadata: nothing is imported."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec

from millstream.plugins.compile.candidate import Missing


def missing_module(module: str, install: str) -> Missing | None:
    """Return what to install if `module` cannot be imported here; None if it can."""
    try:
        found = find_spec(module) is not None
    except (ImportError, ValueError):  # its package is missing, or has no specification
        found = False
    return None if found else Missing(f"the Python package {module} is not installed", install)


def first_missing(*found: Missing | None) -> Missing | None:
    """Return the first of `found` that is not None."""
    return next((missing for missing in found if missing is not None), None)


def runtime_version(*packages: str) -> str:
    """Return "name version" of the first of `packages` that is installed; "unknown" if none is."""
    for package in packages:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def only_cpu(device: str, what: str) -> Missing | None:
    """Return why `what` cannot compile for `device`, unless that is a CPU."""
    return None if device == "cpu" else Missing(f"{what} is used on CPUs alone, not on {device}")


def versions(packages: Sequence[str]) -> str:
    """Return names and versions of those of `packages` that are installed."""
    return ", ".join(found for package in packages if (found := runtime_version(package)) != "unknown")
