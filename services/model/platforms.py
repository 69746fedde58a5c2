"""The names that Triton's protocol has for the format of a model. Pure."""

from __future__ import annotations

from millstream.services.model.manifest import Manifest

PLATFORM, BACKEND = "onnxruntime_onnx", "onnxruntime"
#: Triton's own platforms of PyTorch are TorchScript (pytorch_libtorch) and machine code of AOTInductor (torch_aoti).
TORCH_PLATFORM, TORCH_BACKEND = "torch_export", "pytorch"


def platform_of(manifest: Manifest) -> tuple[str, str]:
    """Return the platform and the backend of a version, as clients of Triton see them."""
    return (TORCH_PLATFORM, TORCH_BACKEND) if manifest.source_format == "torch-export" else (PLATFORM, BACKEND)
