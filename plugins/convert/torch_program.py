"""Imports programs of torch.export (.pt2): converted to ONNX, or served as they are where ONNX cannot express them.

program ─> checked without PyTorch ─> samples, if it runs on generated inputs ─> ONNX ─> the same answers? ─> served
                                                                              └─ no ─> the program itself, with a note
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.plugins.convert.base import ATOL, RTOL, Imported, Importer
from millstream.plugins.convert.onnx_export import MODULES, CannotExport, Export, export, import_torch
from millstream.plugins.engines.torch.archive import is_program_file
from millstream.plugins.engines.torch.document import FORMAT, Program, read_program
from millstream.services.errors import Failure, invalid
from millstream.services.ingest.importers import Array, ImportOptions, Sample, Source

if TYPE_CHECKING:
    from millstream.services.ingest.model_io import ModelTensor

#: rows, and what is added to the size of variable dimensions with which the program runs
_SHAPES = ((3, 0), (1, 0), (4, 3))
#: no further sample is run after this time
_SAMPLES_S_MAX = 10.0


class TorchProgramImporter(Importer):
    """The importer of what torch.export.save wrote."""

    name = "PyTorch"
    extra = "pytorch"
    modules = MODULES
    rehearsal = "millstream.plugins.convert.rehearsals:load_torch"

    def recognises(self, source: Source) -> bool:
        """Return whether it is a program. Without the exporter to ONNX a program is served as it is."""
        return find_spec("onnxscript") is not None and source.path.is_file() and is_program_file(source.path)

    def convert(self, source: Source, options: ImportOptions) -> Imported:
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
    from millstream.services.ingest.trial_inputs import Style, draw, find_probe
    from millstream.services.ingest.trial_session import TrialError

    trial = trial_program(torch, path, program)
    inputs, outputs, session = trial.inputs, trial.outputs, trial.open()
    try:
        probe = find_probe(session, inputs)
    except TrialError as error:
        raise invalid(f"the program runs on no generated input, so that it could not be compared: {error}") from error
    samples: list[Sample] = []
    start = time.monotonic()
    for (rows, more), style in product(_SHAPES, (probe.style, Style.WIDE)):
        if samples and time.monotonic() - start > _SAMPLES_S_MAX:
            break
        try:
            arrays = draw(inputs, rows, probe.size + more, style)
            found = session.run(arrays)
        except TrialError:  # a fixed number of rows, a size or a value that the program refuses
            continue
        given = {tensor.name: array for tensor, array in zip(inputs, arrays, strict=True)}
        samples.append(Sample(given, _answers(outputs, found)))
    if not samples:  # it takes one row and the size of the probe alone
        arrays = draw(inputs, 1, probe.size, probe.style)
        given = {tensor.name: array for tensor, array in zip(inputs, arrays, strict=True)}
        samples.append(Sample(given, _answers(outputs, probe.observed)))
    return samples


def _answers(tensors: Sequence[ModelTensor], arrays: Sequence[Array]) -> dict[str, Array]:
    from millstream.services.model.agreement import as_float

    return {
        tensor.name: as_float("BF16", array) if tensor.datatype == "BF16" else array
        for tensor, array in zip(tensors, arrays, strict=True)
    }


def _export(torch: Any, program: Program, source: Source) -> Sequence[Path]:
    from millstream.plugins.engines.torch.torch_program import load_program

    names = [tensor.name for tensor in program.inputs], [tensor.name for tensor in program.outputs]
    return export(torch, Export(load_program(torch, source.path), *names), source.folder)


def _check(path: Path, program: Program, samples: Sequence[Sample]) -> None:
    """Raise CannotExport if ONNX Runtime cannot load the model, or answers other than the program."""
    from millstream.services.ingest.comparison import compare, worst
    from millstream.services.ingest.graph import read_model
    from millstream.services.ingest.model_io import read_tensors
    from millstream.services.ingest.trial_session import Session, TrialError

    try:
        inputs, outputs = read_tensors(read_model(path))
        if [tensor.name for tensor in inputs] != [tensor.name for tensor in program.inputs]:
            raise CannotExport("its ONNX form has other inputs")
        session = Session(path, inputs, outputs)
        for sample in samples:
            found = session.run([sample.inputs[tensor.name] for tensor in inputs])
            largest = worst(compare(_answers(outputs, found), sample.outputs, RTOL, ATOL))
            if largest.tolerances > 1:
                raise CannotExport(f"its ONNX form answers otherwise, output {largest.output!r}: {largest.where}")
    except (Failure, TrialError) as error:
        raise CannotExport(f"its ONNX form does not run: {error}") from error
