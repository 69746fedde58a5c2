"""The targets "openvino", "openvino-bf16" and "openvino-f16": the version's own file, computed by OpenVINO.

OpenVINO compiles when it loads; the precision of its arithmetic is an option of the load.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millstream.plugins.compile.candidate import Candidate, Compiled, Missing, Narrowing, Subject
from millstream.plugins.compile.targets.base import Target
from millstream.plugins.compile.targets.installed import first_missing, missing_module, only_cpu, runtime_version
from millstream.services.device import find_device

FORMATS = frozenset({"onnx", "openvino"})
BF16_FEATURES = ("amx_bf16", "avx512_bf16", "bf16")  # of processors: any one of them
INSTALL = "pip install 'millstream[openvino]'"
#: Its CPU plug-in keeps integers in 32 bits, and computes comparisons, quotients, remainders, sums over axes, limits
#: and products of matrices in FP32, INT32 included (measured with 2026.4); FP64 becomes FP32.
NARROWS = Narrowing(carried=(1 << 31) - 1, computed=1 << 24)


class OpenVinoPrecision(Target):
    """OpenVINO with one precision of its arithmetic.

    Args:
        name: of the target.
        precision: f32, bf16 or f16.
        features: flags of processors that compute in this precision; empty: all do.
    """

    backend = "openvino"
    narrows = NARROWS

    def __init__(self, name: str, precision: str, features: tuple[str, ...] = ()) -> None:
        self.name = name
        self.lossy = precision != "f32"
        self._precision = precision
        self._features = features

    def available(self, device: str) -> Missing | None:
        """Return what is missing: a CPU, openvino, or instructions of the processor."""
        return first_missing(
            only_cpu(device, self.name), missing_module("openvino", INSTALL), missing_feature(self._features)
        )

    def candidates(self, subject: Subject) -> Sequence[Candidate]:
        """Return one candidate: the version's share of threads is what OpenVINO uses best."""
        if subject.source_format not in FORMATS:
            return ()
        return (Candidate(target=self.name, flags={"precision": self._precision}, lossy=self.lossy),)

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Return the options; no file is written."""
        return Compiled(backend=self.backend, options=candidate.flags, runtime=runtime_version("openvino"))


def missing_feature(features: Sequence[str]) -> Missing | None:
    """Return that the processor lacks all of `features`; None if it has one, or none is needed."""
    if not features or set(features) & set(find_device("cpu").features):
        return None
    return Missing(f"this processor has none of {', '.join(features)}")


TARGETS = (
    OpenVinoPrecision("openvino", "f32"),
    OpenVinoPrecision("openvino-bf16", "bf16", BF16_FEATURES),
    OpenVinoPrecision("openvino-f16", "f16", ("asimdhp",)),
)
