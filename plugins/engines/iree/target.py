"""The target "iree": MLIR and LLVM make a library of the model for this processor.

jax.export ─> StableHLO ┐
ONNX ─> torch-mlir      ┴> iree-compile ─> model.vmfb, with variable rows; or one file for each power of two of rows
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from millstream.plugins.compile.candidate import Candidate, Compiled, Flags, Subject
from millstream.plugins.compile.targets.base import Target, runtime_version
from millstream.plugins.engines.jax import document as jax_export
from millstream.services.errors import Failure, invalid
from millstream.services.model.datatypes import BYTES

INSTALL = "pip install 'millstream[iree]'"
DOCUMENT = "iree.json"  # names of inputs and outputs in the program's order, and its files by rows
ROWS = (1, 2, 4, 8, 16, 32)  # of a model that IREE compiles for fixed rows alone
_MESSAGE_CHARACTERS_MAX = 400
_TOOLS = ("iree-compile", "iree-lld")


class Iree(Target):
    """Compiles for the CPU of this machine."""

    name = backend = "iree"
    formats = frozenset({"onnx", jax_export.FORMAT})
    modules: ClassVar = dict.fromkeys(("iree.compiler", "iree.runtime"), INSTALL)

    def flags(self, subject: Subject) -> Sequence[Flags]:
        """Return the levels of optimization worth a try; none for text."""
        if any(one.datatype == BYTES for one in (*subject.signature.inputs, *subject.signature.outputs)):
            return ()
        return [{"opt_level": "O2", "data_tiling": False}, {"opt_level": "O3", "data_tiling": True}]

    def programs(self) -> Sequence[Path]:
        """Return IREE's compiler, its linker, and the shell by which it starts that."""
        folder = _tools()
        return [*(folder / name for name in _TOOLS), Path("/bin/sh").resolve()] if folder else ()

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Write the library. Raises Failure(INVALID) with the compiler's message."""
        scratch = Path(tempfile.gettempdir())
        jax = subject.source_format == jax_export.FORMAT
        return _compile_jax(subject, candidate, folder, scratch) if jax else _compile_onnx(subject, candidate, folder)


def _compile_onnx(subject: Subject, candidate: Candidate, folder: Path) -> Compiled:
    import onnx
    from iree.compiler.extras import onnx_importer
    from iree.compiler.ir import Context

    model = onnx.load(str(subject.path))
    if model.opset_import[0].version < 17:
        model = onnx.version_converter.convert_version(model, 17)
    model = onnx.shape_inference.infer_shapes(model)
    with Context() as context:
        graph = onnx_importer.ModelInfo(model)
        module = graph.create_module(context=context).operation
        onnx_importer.NodeImporter.define_function(graph.main_graph, module).import_all()
        source = Path(tempfile.gettempdir()) / "model.mlir"
        source.write_text(str(module.get_asm(assume_verified=True)))
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = [one.name for one in model.graph.input if one.name not in stored]
    _run(source, folder / "model.vmfb", "onnx", candidate)
    return _compiled(folder, inputs, [one.name for one in model.graph.output], {0: "model.vmfb"})


def _compile_jax(subject: Subject, candidate: Candidate, folder: Path, scratch: Path) -> Compiled:
    from millstream.plugins.engines.jax.jax_program import JaxProgram, load_library

    program = JaxProgram(load_library(1), subject.path)
    source = scratch / "model.mlir"
    inputs = [program.inputs[place].name for place in program.exported.module_kept_var_idx]
    outputs = [tensor.name for tensor in program.outputs]
    try:
        _write_stablehlo(program, source)
        _run(source, folder / "model.vmfb", "stablehlo", candidate)
        return _compiled(folder, inputs, outputs, {0: "model.vmfb"})
    except Failure:
        if not subject.signature.batching:
            raise
    files = {}
    for rows in (size for size in ROWS if size <= max(1, subject.rows_max)):
        files[rows] = f"rows-{rows}.vmfb"
        _write_stablehlo(program, source, rows)
        _run(source, folder / files[rows], "stablehlo", candidate)
    return _compiled(
        folder, inputs, outputs, files, ("compiled for fixed numbers of rows, which runs are filled up to",)
    )


def _write_stablehlo(program: Any, path: Path, rows: int | None = None) -> None:
    """Write MLIR that a compiler reads: with `rows` in the first dimension of every input, or as it was exported.

    Raises Failure(INVALID) if other sizes than that of rows are variable.
    """
    exported, jax = program.exported, program.library.jax
    if rows is None:
        path.write_bytes(exported.mlir_module_serialized)
        return
    specs = [jax.ShapeDtypeStruct(_with_rows(aval.shape, rows), aval.dtype) for aval in exported.in_avals]
    positional, by_name = jax.tree_util.tree_unflatten(exported.in_tree, specs)
    lowered = jax.jit(exported.call).lower(*positional, **by_name)
    path.write_text(program.library.refine(lowered.compiler_ir("stablehlo")))


def _with_rows(dims: Any, rows: int) -> tuple[int, ...]:
    if any(not isinstance(dim, int) for dim in dims[1:]):
        raise invalid("the function has variable sizes besides the number of rows")
    return (rows, *dims[1:])


def _compiled(
    folder: Path, inputs: Sequence[str], outputs: Sequence[str], files: dict[int, str], notes: tuple[str, ...] = ()
) -> Compiled:
    document = {"inputs": [*inputs], "outputs": [*outputs], "files": {str(rows): name for rows, name in files.items()}}
    (folder / DOCUMENT).write_text(json.dumps(document))
    runtime = runtime_version("iree-base-runtime")
    return Compiled(files=(DOCUMENT, *files.values()), backend=Iree.backend, runtime=runtime, notes=notes)


def _run(source: Path, made: Path, kind: str, candidate: Candidate) -> None:
    """Run IREE's compiler. Raises Failure(INVALID) with the first error that it says."""
    folder = _tools()
    if folder is None:
        raise invalid(f"IREE's compiler is not installed: {INSTALL}")
    options = {
        "iree-input-type": kind,
        "iree-hal-target-backends": "llvm-cpu",
        "iree-llvmcpu-target-cpu": "host",
        "iree-llvmcpu-embedded-linker-path": str(folder / "iree-lld"),
        "iree-input-demote-f64-to-f32": "false",  # which it does without being asked
        "iree-opt-level": str(candidate.flags.get("opt_level", "O2")),
        "iree-opt-data-tiling": "true" if candidate.flags.get("data_tiling") else "false",
        "mlir-print-op-on-diagnostic": "false",
    }
    ended = subprocess.run(
        [folder / "iree-compile", source, "-o", made, *(f"--{name}={value}" for name, value in options.items())],
        capture_output=True,
        text=True,
        check=False,
        env={"TMPDIR": str(source.parent)},
    )
    if ended.returncode or not made.is_file():
        errors = [line.partition("error: ")[2] for line in ended.stderr.splitlines() if "error: " in line]
        said = errors[0] if errors else f"it ended with status {ended.returncode}: {ended.stderr.strip()[-200:]}"
        raise invalid(f"IREE cannot compile the model: {' '.join(said.split())[:_MESSAGE_CHARACTERS_MAX]}")


def _tools() -> Path | None:
    """Return the folder of IREE's programs; None: not installed. Imports nothing of it."""
    try:
        found = find_spec("iree.compiler")
    except ImportError:
        return None
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "_mlir_libs"
    return folder if all((folder / name).is_file() for name in _TOOLS) else None


TARGETS = (Iree(),)
