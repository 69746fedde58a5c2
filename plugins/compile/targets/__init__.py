"""The targets by name, in the order in which a race tries them: those of plug-ins are contributions `targets`."""

from __future__ import annotations

import re

from millstream.plugins.compile.candidate import KEY_DIGITS
from millstream.plugins.compile.targets.base import Target
from millstream.plugins.compile.targets.gpu import GpuPrecision
from millstream.plugins.compile.targets.onnxruntime import Int8Dynamic, Int8Static, OnnxRuntimeSettings
from millstream.services.errors import invalid
from millstream.services.plugin.registry import contributions

TARGETS: tuple[Target, ...] = (
    OnnxRuntimeSettings(),
    *(target for added in contributions("targets", tuple) for target in added),
    Int8Static(),
    Int8Dynamic(),
    GpuPrecision("tensorrt", "fp32"),
    GpuPrecision("tensorrt", "fp16"),
    GpuPrecision("tensorrt", "int8"),
    GpuPrecision("cuda", "fp32"),
    GpuPrecision("cuda", "fp16"),
)


def target_of(name: str) -> Target:
    """Return the target called `name`, or that of the candidate with this key. Raises Failure(INVALID)."""
    keys = (target for target in TARGETS if re.fullmatch(rf"{target.name}-[0-9a-f]{{{KEY_DIGITS}}}", name))
    return next(keys, None) or get_target(name)


def get_target(name: str) -> Target:
    """Return the target called `name`. Raises Failure(INVALID) if there is none."""
    for target in TARGETS:
        if target.name == name:
            return target
    raise invalid(f"unknown target {name!r}; known: {', '.join(target.name for target in TARGETS)}")
