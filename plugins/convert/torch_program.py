"""Imports programs of torch.export (.pt2): converted to ONNX, or served as they are where ONNX cannot express them.

The plug-in `torch` reads programs; where it is off, none is recognised.
program ─> checked without PyTorch ─> samples, if it runs on generated inputs ─> ONNX ─> the same answers? ─> served
                                                                              └─ no ─> the program itself, with a note
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.plugins.convert.base import ATOL, RTOL, Imported, Importer
from millstream.plugins.convert.drawn_samples import ModelInput, draw_samples
from millstream.plugins.convert.onnx_export import MODULES, CannotExport, Export, export, import_torch
from millstream.services.errors import Failure, invalid
from millstream.services.ingest.importers import ImportOptions, Sample, Source
from millstream.services.plugin.registry import is_on

if TYPE_CHECKING:
    from millstream.plugins.engines.torch.document import Program


class TorchProgramImporter(Importer):
    """The importer of what torch.export.save wrote."""

    name = "PyTorch"
    extra = "pytorch"
    modules = MODULES
    rehearsal = "millstream.plugins.convert.onnx_export:load_torch"

    def recognises(self, source: Source) -> bool:
        """Return whether it is a program. Without the exporter to ONNX a program is served as it is."""
        if not is_on("torch") or find_spec("onnxscript") is None:
            return False
        from millstream.plugins.engines.torch.archive import is_program_file

        return source.path.is_file() and is_program_file(source.path)

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        from millstream.plugins.engines.torch.document import FORMAT, read_program

        program = read_program(source.path)
        torch = import_torch()
        samples = _samples(torch, program, source.path)
        made = f"torch {program.made_by}".strip()
        as_it_is = Imported(source.path, FORMAT, samples, made)
        if options.formats and "onnx" not in options.formats:
            return as_it_is
        try:
            files = _export(torch, program, source)
            _check(files[0], program, samples)
        except CannotExport as error:
            if options.formats and FORMAT not in options.formats:
                raise invalid(
                    f"{error}; a program is served as it is by workers with PyTorch: `millstream up --pool "
                    "torch=1,backend=torch`"
                ) from error
            return as_it_is._replace(notes=(f"Served by PyTorch, not as ONNX: {error}.",))
        return Imported(files[0], "onnx", samples, f"{made}, onnxscript {version('onnxscript')}", files=files[1:])


def _samples(torch: Any, program: Program, path: Path) -> list[Sample]:
    from millstream.plugins.engines.torch.inspection import trial_program
    from millstream.services.ingest.import_check import by_name

    trial = trial_program(torch, path, program)
    given = [ModelInput(tensor.name, tensor.datatype, tensor.dims) for tensor in trial.inputs]
    return draw_samples(given, lambda arrays: by_name(trial.outputs, trial.run(arrays)), wide=True)


def _export(torch: Any, program: Program, source: Source) -> Sequence[Path]:
    from millstream.plugins.engines.torch.torch_program import load_program

    names = [tensor.name for tensor in program.inputs], [tensor.name for tensor in program.outputs]
    return export(torch, Export(load_program(torch, source.path), *names), source.folder)


def _check(path: Path, program: Program, samples: Sequence[Sample]) -> None:
    """Raise CannotExport if ONNX Runtime cannot load the model, or answers other than the program."""
    from millstream.services.ingest.graph import read_model
    from millstream.services.ingest.import_check import by_name, compare, worst
    from millstream.services.ingest.model_io import read_tensors
    from millstream.services.ingest.trial_session import Session, TrialError

    try:
        inputs, outputs = read_tensors(read_model(path))
        if [tensor.name for tensor in inputs] != [tensor.name for tensor in program.inputs]:
            raise CannotExport("its ONNX form has other inputs")
        session = Session(path, inputs, outputs)
        for sample in samples:
            found = session.run([sample.inputs[tensor.name] for tensor in inputs])
            largest = worst(compare(by_name(outputs, found), sample.outputs, RTOL, ATOL))
            if largest.tolerances > 1:
                raise CannotExport(f"its ONNX form answers otherwise, output {largest.output!r}: {largest.where}")
    except (Failure, TrialError) as error:
        raise CannotExport(f"its ONNX form does not run: {error}") from error
