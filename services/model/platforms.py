"""The names that Triton's protocol has for the format of a model. Pure."""

from __future__ import annotations

from millstream.services.model.manifest import Manifest

PLATFORM, BACKEND = "onnxruntime_onnx", "onnxruntime"
#: Triton's own platforms of PyTorch are TorchScript (pytorch_libtorch) and machine code of AOTInductor (torch_aoti).
TORCH_PLATFORM, TORCH_BACKEND = "torch_export", "pytorch"


#: what else a version may be, which backends of Triton serve under their own names or not at all
_OTHERS = {
    "torch-export": (TORCH_PLATFORM, TORCH_BACKEND),
    "jax-export": ("jax_export", "jax"),
    "openvino": ("openvino_ir", "openvino"),
}
#: format of a version -> the backend to start for it where none loads it; a pool for ONNX is everywhere
BACKEND_OF_FORMAT = {
    "onnx": "onnxruntime",
    "torch-export": "torch",
    "jax-export": "jax",
    "openvino": "openvino",
    "simulated": "simulated",
}


def platform_of(manifest: Manifest) -> tuple[str, str]:
    """Return the platform and the backend of a version, as clients of Triton see them."""
    return _OTHERS.get(manifest.source_format, (PLATFORM, BACKEND))
