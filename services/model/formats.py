"""The formats of models that plug-ins add to ONNX, and the names that Triton's protocol has for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from millstream.services.model.manifest import Manifest
from millstream.services.plugin.plugin import Format
from millstream.services.plugin.registry import load_for, named

ONNX = "onnx"
PLATFORM, BACKEND = "onnxruntime_onnx", "onnxruntime"
ENSEMBLE = "ensemble"  # Triton's platform of versions that run other versions


def formats() -> Mapping[str, Format]:
    """Return the formats but ONNX, by name."""
    return named("formats", Format)


def format_of(path: Path) -> Format | None:
    """Return the format of the file at `path`, by its content; None: it is ONNX, or nothing known. Raises OSError."""
    return next((one for one in formats().values() if load_for(one, one.recognises)(path)), None)


def format_of_platform(platform: str) -> Format | None:
    """Return the format that Triton's protocol has this platform for; None: no plug-in adds it."""
    return next((one for one in formats().values() if one.platform == platform), None)


def platform_of(manifest: Manifest) -> tuple[str, str]:
    """Return the platform and the backend of a version, as clients of Triton see them."""
    found = formats().get(manifest.source_format)
    return (found.platform, found.platform_backend) if found is not None else (PLATFORM, BACKEND)


def backend_of(source_format: str) -> str:
    """Return the backend to start for a format where no worker loads it; a pool for ONNX is everywhere."""
    if source_format == ONNX:
        return BACKEND
    found = formats().get(source_format)
    return found.backend if found is not None else source_format
