"""Imports TorchScript (torch.jit.save): converted to ONNX with PyTorch's exporter for it.

archive ─> scanned without PyTorch ─> loaded ─> inputs as declared in the upload ─> samples ─> ONNX
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from typing import Any

import numpy as np

from millstream.plugins.convert.base import Imported, Importer
from millstream.plugins.convert.onnx_export import import_torch, reason
from millstream.plugins.convert.torchscript_archive import check_script, is_script_file
from millstream.services.errors import Failure, invalid
from millstream.services.ingest.importers import (
    EXAMPLE,
    IMPORTED,
    Array,
    DeclaredInput,
    ImportOptions,
    Sample,
    Source,
    read_inputs,
)
from millstream.services.model.datatypes import NUMPY

OPSET = 17  # the newest that PyTorch's exporter of TorchScript is tested with
#: rows and sizes of variable dimensions to try, most likely first: images and audio have minimal sizes
_SIZES = (8, 16, 32, 64, 128, 224, 256, 512, 16000)
_ELEMENTS_MAX = 1 << 26


class TorchScriptImporter(Importer):
    """The importer of what torch.jit.save wrote."""

    name = "TorchScript"
    extra = "pytorch"
    modules = ("torch", "onnxscript")
    rehearsal = "millstream.plugins.convert.rehearsals:load_torch"

    def recognises(self, source: Source) -> bool:
        return source.path.is_file() and is_script_file(source.path)

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        check_script(source.path)
        torch = import_torch(exporter=False)
        try:
            module = torch.jit.load(str(source.path), map_location="cpu").eval()
            arguments = [argument.name for argument in module.forward.schema.arguments[1:]]
        except (MemoryError, Failure):
            raise
        except Exception as error:
            raise invalid(f"PyTorch {torch.__version__} cannot load the TorchScript file: {_line(error)}") from error
        inputs = _declared(torch, source, arguments, read_inputs(options.inputs))
        samples = _samples(torch, module, inputs)
        path = source.folder / IMPORTED / "model.onnx"
        path.parent.mkdir(exist_ok=True)
        names = list(samples[0].outputs)
        examples = tuple(torch.from_numpy(np.array(samples[0].inputs[one.name])) for one in inputs)
        try:
            with torch.no_grad(), redirect_stdout(io.StringIO()):
                torch.onnx.export(
                    module,
                    examples,
                    str(path),
                    dynamo=False,
                    opset_version=OPSET,
                    input_names=[one.name for one in inputs],
                    output_names=names,
                    dynamic_axes=_axes(inputs, samples),
                )
        except MemoryError:
            raise
        except Exception as error:
            raise invalid(f"the TorchScript model cannot be exported to ONNX: {reason(error)}") from error
        return Imported(path, "onnx", samples, f"TorchScript, torch {torch.__version__}")


def _declared(
    torch: Any, source: Source, arguments: Sequence[str], inputs: Sequence[DeclaredInput]
) -> Sequence[DeclaredInput]:
    """Return the declared inputs in the order of the model's arguments. Raises Failure(INVALID) with the options."""
    if not inputs:
        raise invalid(
            "a TorchScript file does not say which datatypes and shapes it takes: push it with "
            + " ".join(f"--input {spec}" for spec in _traced(torch, source, arguments))
        )
    by_name = {one.name: one for one in inputs}
    unknown = [one.name for one in inputs if one.name not in arguments]
    if unknown:
        raise invalid(f"the model has no input {unknown[0]!r}: its inputs are {', '.join(arguments)[:300]}")
    given = [by_name[name] for name in arguments if name in by_name]
    if [one.name for one in given] != list(arguments[: len(given)]):
        missing = next(name for name in arguments if name not in by_name)
        raise invalid(f"the input {missing!r} is not declared: add --input {missing}:FP32:SHAPE")
    return given


def _traced(torch: Any, source: Source, arguments: Sequence[str]) -> list[str]:
    """Return the declarations to send: with the shapes that the file was traced with, where it has them."""
    datatypes = {np.dtype(dtype).name: name for name, dtype in NUMPY.items() if name not in {"BYTES", "BF16"}}
    try:
        traced = list(torch.jit.load(str(source.path), _restore_shapes=True).forward.graph.inputs())[1:]
        types = [(value.type().sizes(), str(value.type().dtype()).removeprefix("torch.")) for value in traced]
        return [
            f"{name}:{datatypes[dtype]}:{','.join(map(str, (-1, *sizes[1:])))}"
            for name, (sizes, dtype) in zip(arguments, types, strict=True)
        ]
    except Exception:  # a scripted module has no shapes
        return [f"{name}:{EXAMPLE.partition(':')[2]}" for name in arguments]


def _samples(torch: Any, module: Any, inputs: Sequence[DeclaredInput]) -> list[Sample]:
    """Return what the model answers for several rows and sizes. Raises Failure(INVALID) if it runs on none."""
    generator = np.random.default_rng(1)
    failure: Exception | None = None
    for size in _SIZES:
        try:
            first = _sample(torch, module, inputs, 3, size, generator)
        except MemoryError:
            raise
        except Exception as error:
            failure = failure or error
            continue
        samples = [first]
        for rows, larger in ((1, size), (4, size), (2, size + size // 2)):
            with suppress(Exception):  # a size that the model does not take
                samples.append(_sample(torch, module, inputs, rows, larger, generator))
        return samples
    assert failure is not None
    raise invalid(f"the model does not run on the inputs that are declared: {_line(failure)}")


def _sample(
    torch: Any, module: Any, inputs: Sequence[DeclaredInput], rows: int, size: int, generator: np.random.Generator
) -> Sample:
    arrays = {one.name: _draw(one, rows, size, generator) for one in inputs}
    with torch.inference_mode():
        found = module(*(torch.from_numpy(np.array(array)) for array in arrays.values()))
    if isinstance(found, torch.Tensor):
        found = [found]
    pairs = found.items() if isinstance(found, dict) else ((f"output_{at}", one) for at, one in enumerate(found))
    outputs = dict(pairs)
    if not outputs or not all(isinstance(tensor, torch.Tensor) for tensor in outputs.values()):
        raise invalid("the model returns something else than tensors, a tuple of them or a dictionary of them")
    return Sample(arrays, {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in outputs.items()})


def _draw(one: DeclaredInput, rows: int, size: int, generator: np.random.Generator) -> Array:
    shape = tuple((size if axis else rows) if length == -1 else length for axis, length in enumerate(one.shape))
    if math.prod(shape) > _ELEMENTS_MAX:
        raise invalid(f"the input {one.name!r} is too large to try: {list(shape)}")
    dtype = NUMPY[one.datatype]
    if np.issubdtype(dtype, np.floating):
        return generator.standard_normal(shape).astype(dtype)
    return generator.integers(0, 2, shape).astype(dtype)


def _axes(inputs: Sequence[DeclaredInput], samples: Sequence[Sample]) -> dict[str, dict[int, str]]:
    """Return the variable axes by tensor: those declared of inputs, those that differ between samples of outputs."""
    axes = {one.name: {axis: _axis(axis) for axis, size in enumerate(one.shape) if size == -1} for one in inputs}
    for name, array in samples[0].outputs.items():
        shapes = [sample.outputs[name].shape for sample in samples if sample.outputs[name].ndim == array.ndim]
        axes[name] = {axis: _axis(axis) for axis in range(array.ndim) if len({shape[axis] for shape in shapes}) > 1}
    return {name: found for name, found in axes.items() if found}


def _axis(axis: int) -> str:
    return f"size_{axis}" if axis else "rows"


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
