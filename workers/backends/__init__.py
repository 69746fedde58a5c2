"""The backends by name; an inference library is imported when its first model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millstream.plugins.engines.iree.worker import Iree
from millstream.plugins.engines.jax.worker import Jax
from millstream.plugins.engines.openvino.worker import OpenVino
from millstream.plugins.engines.torch.worker import Torch
from millstream.plugins.engines.triton.worker import Triton
from millstream.plugins.engines.tvm.worker import Tvm
from millstream.services.errors import invalid
from millstream.workers.backends.base import Backend
from millstream.workers.backends.onnxruntime import OnnxRuntime
from millstream.workers.backends.simulated import Simulated

BACKENDS: dict[str, Callable[[Path | None], Backend]] = {
    "iree": lambda _: Iree(),
    "jax": lambda _: Jax(),
    "onnxruntime": OnnxRuntime,
    "openvino": lambda _: OpenVino(),
    "simulated": lambda _: Simulated(),
    "torch": lambda _: Torch(),
    "triton": lambda _: Triton(),
    "tvm": lambda _: Tvm(),
}


def get_backend(name: str, home: Path | None = None) -> Backend:
    """Return the backend called `name`, which may keep files in `home`. Raises Failure(INVALID) for an unknown name."""
    if name not in BACKENDS:
        raise invalid(f"unknown backend {name!r}; known: {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name](home)
