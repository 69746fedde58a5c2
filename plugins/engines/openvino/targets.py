"""The targets of OpenVINO: the version's own file with a precision, or INT8 weights by NNCF.

openvino, -bf16, -f16: no file is written; OpenVINO compiles when it loads, with the precision as an option
openvino-int8: calibrate on samples, correct biases ─> INT8 weights and activations
openvino-int8-dynamic: weights of matrix products to 8 bits by channel; activations are quantized at each run
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from millstream.plugins.compile.calibration import Feed, can_be_sampled, cosine, read_feeds
from millstream.plugins.compile.candidate import Candidate, Compiled, Flags, Narrowing, Subject
from millstream.plugins.compile.targets.base import Target, missing_feature, runtime_version
from millstream.services.errors import invalid

BF16_FEATURES = ("amx_bf16", "avx512_bf16", "bf16")  # of processors: any one of them
#: Its CPU plug-in keeps integers in 32 bits, and computes comparisons, quotients, remainders, sums over axes, limits
#: and products of matrices in FP32, INT32 included (measured with 2026.4); FP64 becomes FP32.
NARROWS = Narrowing(carried=(1 << 31) - 1, computed=1 << 24)
MODEL, WEIGHTS = "int8.xml", "int8.bin"
INSTALL_NNCF = "pip install 'millstream[nncf]'"
SAMPLES_MAX = 300  # of a calibration: more made no difference
CONTROL_SAMPLES_MAX = 64  # each trial of the accuracy control runs them all
COSINE_DROP_MAX = 0.001  # of the mean cosine of an output with that of the version, under accuracy control
PRODUCTS = frozenset({"MatMul", "Constant", "Convert", "Transpose", "Reshape"})  # of matrices, and the way to weights
GROUPS = (32, 128)  # numbers with one scale: small ones are accurate, large ones fast


class OpenVinoTarget(Target):
    """What all targets of OpenVINO are."""

    backend = "openvino"
    formats = frozenset({"onnx", "openvino"})
    narrows = NARROWS


class OpenVinoPrecision(OpenVinoTarget):
    """OpenVINO with one precision of its arithmetic, f32, bf16 or f16. `features`: of processors that compute in it."""

    modules: ClassVar = {"openvino": "pip install 'millstream[openvino]'"}

    def __init__(self, name: str, precision: str, features: tuple[str, ...] = ()) -> None:
        self.name = name
        self.lossy = precision != "f32"
        self.features = features
        self._precision = precision

    def flags(self, subject: Subject) -> Sequence[Flags]:
        """Return the precision: the version's share of threads is what OpenVINO uses best."""
        return [{"precision": self._precision}]

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Return the options; no file is written."""
        return Compiled(backend=self.backend, options=candidate.flags, runtime=runtime_version("openvino"))


class NncfTarget(OpenVinoTarget):
    """A target whose weights have 8 bits by NNCF."""

    lossy = True
    modules: ClassVar = dict.fromkeys(("openvino", "nncf"), INSTALL_NNCF)

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Quantize and write OpenVINO's files. See `Target`."""
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # it reports to its makers
        import openvino

        front_end = openvino.frontend.FrontEndManager().load_by_framework(
            "ir" if subject.path.suffix == ".xml" else "onnx"
        )  # no other front end reads it
        model = front_end.convert(front_end.load(str(subject.path)))
        quantized, note = self.quantize(openvino, model, subject, candidate, samples)
        openvino.save_model(quantized, str(folder / MODEL), compress_to_fp16=False)
        versions = [runtime_version(package) for package in ("openvino", "nncf")]
        return Compiled(
            files=(MODEL, WEIGHTS),
            backend=self.backend,
            options={name: value for name, value in candidate.flags.items() if name != "accuracy_control"},
            runtime=", ".join(versions),
            notes=(note,),
        )

    def quantize(
        self, library: Any, model: Any, subject: Subject, candidate: Candidate, samples: Path | None
    ) -> tuple[Any, str]:
        """Return the quantized model, and a note about it."""
        raise NotImplementedError


class OpenVinoInt8(NncfTarget):
    """Quantizes weights and activations.

    With accuracy control NNCF returns operators to floating point until the outputs are close enough.
    """

    name = "openvino-int8"

    def flags(self, subject: Subject) -> Sequence[Flags]:
        """Return plain quantization, the same with the rest in BF16 where the processor has that, and with control."""
        if not can_be_sampled(subject):
            return ()
        plain: list[Flags] = [{"accuracy_control": False, "precision": precision} for precision in _precisions()]
        return [*plain, {"accuracy_control": True, "precision": "f32"}]

    def quantize(
        self, library: Any, model: Any, subject: Subject, candidate: Candidate, samples: Path | None
    ) -> tuple[Any, str]:
        feeds = single_rows(read_feeds(samples, subject, SAMPLES_MAX), batching=subject.signature.batching)
        transformer = has_attention(model)
        control = bool(candidate.flags["accuracy_control"])
        quantized = _quantize(library, model, feeds, transformer=transformer, control=control)
        found = sum(operator.get_type_name() == "FakeQuantize" for operator in quantized.get_ops())
        kind = "with attention" if transformer else "without attention"
        return quantized, f"quantized as a model {kind}, {found} quantizers, {len(feeds)} samples"


class OpenVinoInt8Dynamic(NncfTarget):
    """Compresses the weights of matrix products for OpenVINO, which quantizes activations at each run.

    Each row of an activation is cut into groups of numbers, which have a scale each: rows stay independent, and no
    samples are needed. Tables of embeddings keep their numbers: 8 bits there cost accuracy and gain no time.
    """

    name = "openvino-int8-dynamic"
    #: Without these instructions OpenVINO computes compressed weights in floating point, which gains nothing.
    features = ("avx_vnni", "avx512_vnni", "amx_int8")

    def flags(self, subject: Subject) -> Sequence[Flags]:
        """Return one for each size of a group, and the smallest with the rest in BF16 where the processor has that."""
        found: list[Flags] = [{"dynamic_group": group, "precision": "f32"} for group in GROUPS]
        return found + [{"dynamic_group": GROUPS[0], "precision": one} for one in _precisions()[1:]]

    def quantize(
        self, library: Any, model: Any, subject: Subject, candidate: Candidate, samples: Path | None
    ) -> tuple[Any, str]:
        import nncf

        others = [one.get_friendly_name() for one in model.get_ops() if one.get_type_name() not in PRODUCTS]
        compressed = nncf.compress_weights(
            model,
            mode=nncf.CompressWeightsMode.INT8_ASYM,
            ignored_scope=nncf.IgnoredScope(names=others, validate=False),
        )
        stored = [one for one in compressed.get_ops() if one.get_type_name() == "Constant"]
        found = sum(one.get_element_type() == library.Type.u8 and len(one.get_shape()) == 2 for one in stored)
        if not found:
            raise invalid("the model has no product with a constant matrix")
        return compressed, f"{found} matrices of 8 bits"


def _precisions() -> list[str]:
    """Return the precisions of what is not quantized."""
    return ["f32"] if missing_feature(BF16_FEATURES) else ["f32", "bf16"]


def has_attention(model: Any) -> bool:
    """Return whether a softmax weights a product of matrices: activations have outliers, as those of transformers."""
    for operator in model.get_ops():
        kind = operator.get_type_name()
        if kind == "ScaledDotProductAttention":
            return True
        if kind == "Softmax":
            readers = operator.output(0).get_target_inputs()
            if any(reader.get_node().get_type_name() == "MatMul" for reader in readers):
                return True
    return False


def single_rows(feeds: Sequence[Feed], *, batching: bool) -> list[Feed]:
    """Return one feed for each row: statistics and corrections are by sample."""
    if not batching:
        return list(feeds)
    return [
        {name: array[row : row + 1] for name, array in feed.items()}
        for feed in feeds
        for row in range(len(next(iter(feed.values()))))
    ]


def _quantize(library: Any, model: Any, feeds: Sequence[Feed], *, transformer: bool, control: bool) -> Any:
    import nncf

    options = {
        "model_type": nncf.ModelType.TRANSFORMER if transformer else None,
        "preset": nncf.QuantizationPreset.MIXED if transformer else nncf.QuantizationPreset.PERFORMANCE,
        "target_device": nncf.TargetDevice.CPU,
        "subset_size": len(feeds),
    }
    if not control:
        return nncf.quantize(model, nncf.Dataset(feeds), **options)
    compared = list(feeds[:CONTROL_SAMPLES_MAX])
    reference = library.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    expected = [_outputs(reference, feed) for feed in compared]

    def validate(compiled: Any, data: Iterable[Feed]) -> tuple[float, list[float]]:
        found = [_likeness(_outputs(compiled, feed), wanted) for feed, wanted in zip(data, expected, strict=False)]
        return float(np.mean(found)), found

    return nncf.quantize_with_accuracy_control(
        model,
        nncf.Dataset(feeds),
        nncf.Dataset(compared),
        validate,
        max_drop=COSINE_DROP_MAX,
        drop_type=nncf.DropType.ABSOLUTE,
        **options,
    )


def _outputs(compiled: Any, feed: Feed) -> list[Any]:
    return [np.array(array, dtype=np.float64).ravel() for array in compiled(feed).values()]


def _likeness(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the smallest cosine of all outputs of one sample."""
    return min((cosine(one, other) for one, other in zip(found, expected, strict=True)), default=1.0)


TARGETS = (
    OpenVinoPrecision("openvino", "f32"),
    OpenVinoPrecision("openvino-bf16", "bf16", BF16_FEATURES),
    OpenVinoPrecision("openvino-f16", "f16", ("asimdhp",)),
    OpenVinoInt8(),
    OpenVinoInt8Dynamic(),
)
