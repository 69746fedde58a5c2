"""The target "openvino-int8": INT8 weights and activations, quantized by NNCF, computed by OpenVINO.

read ─> NNCF: calibrate on samples, correct biases ─> OpenVINO's own files
With accuracy control NNCF returns operators to floating point until the outputs are close enough.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millstream.plugins.compile.candidate import Candidate, Compiled, Flags, Missing, Subject
from millstream.plugins.compile.samples import Feed, can_be_sampled, cosine, read_feeds
from millstream.plugins.compile.targets.base import Target
from millstream.plugins.compile.targets.installed import first_missing, missing_module, only_cpu, versions
from millstream.plugins.engines.openvino.target import BF16_FEATURES, FORMATS, NARROWS, missing_feature

MODEL, WEIGHTS = "int8.xml", "int8.bin"
INSTALL = "pip install 'millstream[nncf]'"
SAMPLES_MAX = 300  # of a calibration: more made no difference
CONTROL_SAMPLES_MAX = 64  # each trial of the accuracy control runs them all
COSINE_DROP_MAX = 0.001  # of the mean cosine of an output with that of the version, under accuracy control


class OpenVinoInt8(Target):
    """Quantizes for OpenVINO."""

    name = "openvino-int8"
    backend = "openvino"
    narrows = NARROWS
    lossy = True

    def available(self, device: str) -> Missing | None:
        """Return what is missing: a CPU, openvino or nncf."""
        return first_missing(
            only_cpu(device, self.name), missing_module("openvino", INSTALL), missing_module("nncf", INSTALL)
        )

    def candidates(self, subject: Subject) -> Sequence[Candidate]:
        """Return plain quantization, the same with the rest in BF16 where the processor has that, and with control."""
        if subject.source_format not in FORMATS or not can_be_sampled(subject):
            return ()
        flags: list[Flags] = [{"accuracy_control": False, "precision": "f32"}]
        if missing_feature(BF16_FEATURES) is None:
            flags.append({"accuracy_control": False, "precision": "bf16"})
        flags.append({"accuracy_control": True, "precision": "f32"})
        return tuple(Candidate(target=self.name, flags=one, lossy=True) for one in flags)

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Quantize and write OpenVINO's files. See `Target`."""
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # it reports to its makers
        import openvino

        feeds = single_rows(read_feeds(samples, subject, SAMPLES_MAX), batching=subject.signature.batching)
        model = read_model(openvino, subject.path)
        transformer = has_attention(model)
        control = bool(candidate.flags["accuracy_control"])
        quantized = _quantize(openvino, model, feeds, transformer=transformer, control=control)
        openvino.save_model(quantized, str(folder / MODEL), compress_to_fp16=False)
        found = sum(operator.get_type_name() == "FakeQuantize" for operator in quantized.get_ops())
        kind = "with attention" if transformer else "without attention"
        return Compiled(
            files=(MODEL, WEIGHTS),
            backend=self.backend,
            options={"precision": candidate.flags["precision"]},
            runtime=versions(("openvino", "nncf")),
            notes=(f"quantized as a model {kind}, {found} quantizers, {len(feeds)} samples",),
        )


def read_model(library: Any, path: Path) -> Any:
    """Return the model of an ONNX file or OpenVINO's own; no other front end reads it."""
    front_end = library.frontend.FrontEndManager().load_by_framework("ir" if path.suffix == ".xml" else "onnx")
    return front_end.convert(front_end.load(str(path)))


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


TARGETS = (OpenVinoInt8(),)
