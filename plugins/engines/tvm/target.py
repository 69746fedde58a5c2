"""The target "tvm": Apache TVM makes a library of machine code from ONNX. Experimental: it races only if it is named.

ONNX ─> Relax, with variable sizes ─> schedules for CPUs ─> LLVM ─> objects ─> ld ─> model.so
Without TVM's tuner, which runs thousands of programs for hours: what it compiles is rarely as fast as the baseline.
The library is machine code: it is made here, from the version, and never taken from an upload.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from millstream.plugins.compile.candidate import Candidate, Compiled, Flags, Missing, Subject
from millstream.plugins.compile.targets.base import Target, runtime_version
from millstream.services.errors import invalid
from millstream.services.model.datatypes import BYTES

DOCUMENT = "tvm.json"  # the file of the library, and names of inputs and outputs in the order of its function
LIBRARY = "model.so"
ROWS = "rows"  # name of the first dimension where the model has none, and requests share runs
_MESSAGE_CHARACTERS_MAX = 400
_LINKER = "ld"


def load_tvm() -> Any:
    """Return the module `tvm` with its virtual machine. Raises ImportError.

    TVM imports PyTorch wherever it is installed, only to be there before it: that is left out.
    """
    missing = "torch" not in sys.modules
    if missing:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tvm
        import tvm.runtime.vm
    finally:
        if missing:
            del sys.modules["torch"]
    return tvm


class Tvm(Target):
    """Compiles for the CPU of this machine."""

    name = backend = "tvm"
    experimental = True
    modules: ClassVar = {"tvm": "pip install 'millstream[tvm]'"}

    def available(self, device: str) -> Missing | None:
        """Return what is missing: a CPU, TVM, or a linker."""
        linker = None if shutil.which(_LINKER) else Missing(f"there is no {_LINKER}", "apt-get install binutils")
        return super().available(device) or linker

    def flags(self, subject: Subject) -> Sequence[Flags]:
        """Return TVM's schedules for products of matrices and sums on CPUs, and plain loops; none for text."""
        if any(one.datatype == BYTES for one in (*subject.signature.inputs, *subject.signature.outputs)):
            return ()
        return [{"schedules": chosen} for chosen in (True, False)]

    def programs(self) -> Sequence[Path]:
        """Return the linker."""
        found = shutil.which(_LINKER)
        return [Path(found).resolve()] if found is not None else ()

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Write the library. Raises Failure(INVALID) with TVM's message."""
        import onnx

        tvm = load_tvm()
        from tvm.relax.frontend.onnx import from_onnx

        model = onnx.load(str(subject.path))
        inputs = name_sizes(model, batching=subject.signature.batching)
        try:
            module = from_onnx(model, keep_params_in_input=False)
            target = tvm.target.Target({"kind": "llvm", "mcpu": _processor(tvm)})
            pipeline = _scheduled(tvm, target) if candidate.flags["schedules"] else "default"
            executable = tvm.compile(module, target, relax_pipeline=pipeline)
        except Exception as error:
            said = " ".join(str(error).split())[:_MESSAGE_CHARACTERS_MAX] or type(error).__name__
            raise invalid(f"TVM cannot compile the model: {said}") from error
        executable.export_library(str(folder / LIBRARY), fcompile=_linked)
        names = {"library": LIBRARY, "inputs": inputs, "outputs": [one.name for one in model.graph.output]}
        (folder / DOCUMENT).write_text(json.dumps(names))
        return Compiled(
            files=(DOCUMENT, LIBRARY),
            backend=self.backend,
            options={"compiled": True},
            runtime=runtime_version("apache-tvm"),
        )


def name_sizes(model: Any, *, batching: bool) -> list[str]:
    """Name the sizes that `model` leaves open, since TVM takes only named ones; return the names of its inputs.

    Args:
        model: an onnx.ModelProto, which is changed.
        batching: whether the first size of all inputs is the rows of a run.
    """
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = [one for one in model.graph.input if one.name not in stored]
    for number, one in enumerate(inputs):
        for place, size in enumerate(one.type.tensor_type.shape.dim):
            if not size.HasField("dim_value") and not size.dim_param:
                size.dim_param = ROWS if batching and place == 0 else f"size_{number}_{place}"
    return [one.name for one in inputs]


def _processor(tvm: Any) -> str:
    """Return LLVM's name of this processor."""
    return str(tvm.get_global_func("target.llvm_get_system_cpu")())


def _scheduled(tvm: Any, target: Any) -> Any:
    """Return TVM's own pipeline, after the schedules that it has for CPUs."""
    from tvm import relax
    from tvm.s_tir import dlight

    def scheduled(module: Any, _: Any) -> Any:
        with target:
            module = tvm.transform.Sequential(
                [
                    relax.transform.LegalizeOps(),
                    relax.transform.AnnotateTIROpPattern(),
                    relax.transform.FoldConstant(),
                    relax.transform.FuseOps(),
                    relax.transform.FuseTIR(),
                    dlight.ApplyDefaultSchedule(dlight.cpu.GEMV(), dlight.cpu.Reduction()),
                ]
            )(module)
        return relax.get_default_pipeline(target)(module)

    return tvm.transform.module_pass(scheduled, opt_level=0)


def _linked(made: str, objects: Sequence[str], *_: Any, **__: Any) -> None:
    """Link objects to a library: the names that it lacks are those of TVM and libc, which the process has."""
    linker = shutil.which(_LINKER) or _LINKER
    ended = subprocess.run(
        [linker, "-shared", "-o", made, *objects], capture_output=True, text=True, check=False, env={}
    )
    if ended.returncode:
        raise invalid(f"{_LINKER} ended with status {ended.returncode}: {ended.stderr.strip()[-200:]}")


_linked.output_format = "so"  # type: ignore[attr-defined]  # as TVM wants it


TARGETS = (Tvm(),)
