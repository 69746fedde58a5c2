"""The targets for NVIDIA GPUs: ONNX Runtime's CUDA and TensorRT providers, with the precision decided in the ONNX file.

fp32: the version's own file · fp16: weights and operators cast, inputs and outputs as they were · int8: QDQ, symmetric
TensorRT's flags that choose a precision are deprecated: a strongly typed network has the types of its file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from millstream.plugins.compile.calibration import can_be_sampled, read_feeds
from millstream.plugins.compile.candidate import Candidate, Compiled, Flags, Missing, Narrowing, Subject
from millstream.plugins.compile.targets.base import Target, missing_module, runtime_version
from millstream.plugins.compile.targets.onnxruntime import prepare
from millstream.services.device import find_device

FP16, INT8 = "fp16.onnx", "int8.onnx"
INSTALL_DRIVER = "a GPU with NVIDIA's driver, then pip install 'millstream[gpu]'"
INSTALL = "pip install 'millstream[gpu]' in place of millstream[cpu]"
INSTALL_TENSORRT = "install TensorRT 10, which ONNX Runtime is linked to: pip install 'tensorrt-cu13<11'"
SIGNED_MAX = (1 << 31) - 1
_TENSORRT_PACKAGES = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-lean")


class GpuPrecision(Target):
    """One execution provider with one precision. Bytes of engines differ: TensorRT times its kernels.

    Args:
        provider: cuda or tensorrt.
        precision: fp32, fp16 or int8.
    """

    backend = "onnxruntime"

    def __init__(self, provider: str, precision: str) -> None:
        self.name = provider if precision == "fp32" else f"{provider}-{precision}"
        self.lossy = precision != "fp32"
        # TensorRT casts INT64 down to INT32 where it can, and FP64 to FP32 (onnx-tensorrt, "Supported ONNX Operators").
        self.narrows = Narrowing(SIGNED_MAX, SIGNED_MAX) if provider == "tensorrt" else None
        self._provider = provider
        self._precision = precision

    def available(self, device: str) -> Missing | None:
        """Return what is missing: a GPU that the driver knows, onnxruntime-gpu, or TensorRT."""
        if device.partition(":")[0] not in {"cuda", "tensorrt"}:
            return Missing(f"{self.name} is used on NVIDIA GPUs, not on {device}")
        if not find_device(device).name:
            return Missing(f"the NVIDIA driver knows no {device}", INSTALL_DRIVER)
        if not _installed(("onnxruntime-gpu",)):
            return Missing("onnxruntime-gpu is not installed", INSTALL)
        if self._provider == "tensorrt" and not _installed(_TENSORRT_PACKAGES):
            return Missing("TensorRT is not installed", INSTALL_TENSORRT)
        return missing_module("onnx", "pip install onnx") if self.lossy else None

    def flags(self, subject: Subject) -> Sequence[Flags]:
        """Return the provider; none for what the version is served with already."""
        served_with = subject.device.partition(":")[0]
        sampled = self._precision != "int8" or can_be_sampled(subject)
        served = served_with == "cpu" or (self._precision == "fp32" and self._provider == served_with)
        return [{"provider": self._provider}] if sampled and not served else ()

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Write the file with another precision; TensorRT builds its engine when it is loaded. See `Target`."""
        files: tuple[str, ...] = ()
        if self._precision == "fp16":
            _write_fp16(subject.path, folder / FP16)
            files = (FP16,)
        elif self._precision == "int8":
            _write_int8(subject, samples, folder / INT8)
            files = (INT8,)
        return Compiled(
            files=files,
            backend=self.backend,
            options=candidate.flags,
            runtime=runtime_version("onnxruntime-gpu", "onnxruntime"),
        )


def _installed(packages: Sequence[str]) -> bool:
    return any(runtime_version(package) != "unknown" for package in packages)


def _write_fp16(source: Path, path: Path) -> None:
    """Cast weights and operators; inputs and outputs keep their datatypes, as the signature says."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.shape_inference.infer_shapes(onnx.load(str(source)))
    onnx.save(convert_float_to_float16(model, keep_io_types=True, disable_shape_infer=True), str(path))


def _write_int8(subject: Subject, samples: Path | None, path: Path) -> None:
    """Quantize with zero points of 0, weights and activations as S8: TensorRT takes nothing else."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    from millstream.plugins.compile.targets.onnxruntime import FeedReader

    with TemporaryDirectory() as scratch:
        quantize_static(
            prepare(subject.path, Path(scratch)),
            path,
            FeedReader(read_feeds(samples, subject)),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            extra_options={"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False},
        )
