"""The targets by name, in the order in which a race tries them."""

from __future__ import annotations

import re

from millstream.plugins.compile.candidate import KEY_DIGITS
from millstream.plugins.compile.targets.base import Target
from millstream.plugins.compile.targets.gpu import GpuPrecision
from millstream.plugins.compile.targets.onnxruntime import OnnxRuntimeSettings
from millstream.plugins.compile.targets.onnxruntime_int8 import Int8Dynamic, Int8Static
from millstream.plugins.compile.targets.refused import REFUSED
from millstream.plugins.engines.iree.target import Iree
from millstream.plugins.engines.jax.target import Xla
from millstream.plugins.engines.openvino.target import BF16_FEATURES, OpenVinoPrecision
from millstream.plugins.engines.openvino.target_int8 import OpenVinoInt8
from millstream.plugins.engines.openvino.target_int8_dynamic import OpenVinoInt8Dynamic
from millstream.plugins.engines.torch.aotinductor import AotInductor
from millstream.plugins.engines.tvm.target import Tvm
from millstream.services.errors import invalid

TARGETS: tuple[Target, ...] = (
    OnnxRuntimeSettings(),
    OpenVinoPrecision("openvino", "f32"),
    OpenVinoPrecision("openvino-bf16", "bf16", BF16_FEATURES),
    OpenVinoPrecision("openvino-f16", "f16", ("asimdhp",)),
    OpenVinoInt8(),
    OpenVinoInt8Dynamic(),
    Int8Static(),
    Int8Dynamic(),
    Xla(),
    Iree(),
    AotInductor(),
    GpuPrecision("tensorrt", "fp32"),
    GpuPrecision("tensorrt", "fp16"),
    GpuPrecision("tensorrt", "int8"),
    GpuPrecision("cuda", "fp32"),
    GpuPrecision("cuda", "fp16"),
    Tvm(),
    *REFUSED,
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
