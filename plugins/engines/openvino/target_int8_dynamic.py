"""The target "openvino-int8-dynamic": INT8 weights by NNCF, activations quantized by OpenVINO at each run.

read ─> NNCF: weights of matrix products to 8 bits by channel ─> OpenVINO's own files, and the size of a group
Each row of an activation is cut into groups of that many numbers, which have a scale each: rows stay independent, and
no samples are needed. Tables of embeddings keep their numbers: 8 bits there cost accuracy and gain no time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from millstream.plugins.compile.candidate import Candidate, Compiled, Flags, Missing, Subject
from millstream.plugins.compile.targets.base import Target
from millstream.plugins.compile.targets.installed import first_missing, missing_module, only_cpu, versions
from millstream.plugins.engines.openvino.target import BF16_FEATURES, FORMATS, NARROWS, missing_feature
from millstream.plugins.engines.openvino.target_int8 import INSTALL, MODEL, WEIGHTS, read_model
from millstream.services.errors import invalid

#: Without these instructions OpenVINO computes compressed weights in floating point, which gains nothing.
INT8_FEATURES = ("avx_vnni", "avx512_vnni", "amx_int8")
PRODUCTS = frozenset({"MatMul", "Constant", "Convert", "Transpose", "Reshape"})  # of matrices, and the way to weights
GROUPS = (32, 128)  # numbers with one scale: small ones are accurate, large ones fast


class OpenVinoInt8Dynamic(Target):
    """Compresses the weights of matrix products for OpenVINO, which quantizes activations at each run."""

    name = "openvino-int8-dynamic"
    backend = "openvino"
    narrows = NARROWS
    lossy = True

    def available(self, device: str) -> Missing | None:
        """Return what is missing: a CPU, openvino, nncf, or instructions of the processor."""
        return first_missing(
            only_cpu(device, self.name),
            missing_module("openvino", INSTALL),
            missing_module("nncf", INSTALL),
            missing_feature(INT8_FEATURES),
        )

    def candidates(self, subject: Subject) -> Sequence[Candidate]:
        """Return one for each size of a group, and the smallest with the rest in BF16 where the processor has that."""
        if subject.source_format not in FORMATS:
            return ()
        flags: list[Flags] = [{"dynamic_group": group, "precision": "f32"} for group in GROUPS]
        if missing_feature(BF16_FEATURES) is None:
            flags.append({"dynamic_group": GROUPS[0], "precision": "bf16"})
        return tuple(Candidate(target=self.name, flags=one, lossy=True) for one in flags)

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Compress the weights and write OpenVINO's files. See `Target`."""
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # it reports to its makers
        import nncf
        import openvino

        model = read_model(openvino, subject.path)
        others = [one.get_friendly_name() for one in model.get_ops() if one.get_type_name() not in PRODUCTS]
        compressed = nncf.compress_weights(
            model,
            mode=nncf.CompressWeightsMode.INT8_ASYM,
            ignored_scope=nncf.IgnoredScope(names=others, validate=False),
        )
        stored = [one for one in compressed.get_ops() if one.get_type_name() == "Constant"]
        found = sum(one.get_element_type() == openvino.Type.u8 and len(one.get_shape()) == 2 for one in stored)
        if not found:
            raise invalid("the model has no product with a constant matrix")
        openvino.save_model(compressed, str(folder / MODEL), compress_to_fp16=False)
        return Compiled(
            files=(MODEL, WEIGHTS),
            backend=self.backend,
            options=candidate.flags,
            runtime=versions(("openvino", "nncf")),
            notes=(f"{found} matrices of 8 bits",),
        )


TARGETS = (OpenVinoInt8Dynamic(),)
