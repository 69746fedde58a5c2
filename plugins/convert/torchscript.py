"""Imports TorchScript (torch.jit.save): converted to ONNX with PyTorch's exporter for it.

archive ─> scanned without PyTorch ─> loaded ─> inputs as declared in the upload ─> samples ─> ONNX
zip ─> members of TorchScript alone ─> pickles name tensors and its own classes alone ─> code uses PyTorch's operators
TorchScript's code is text that PyTorch compiles for its own interpreter: it reaches no Python, but it may call
operators that read and write files, and operators of libraries that are not here. Source: PyTorch 2.13,
torch/csrc/jit/serialization/{export_module,import,unpickler}.cpp.
"""

from __future__ import annotations

import io
import pickletools
import re
import struct
import zipfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from millstream.plugins.convert.base import Imported, Importer
from millstream.plugins.convert.drawn_samples import ModelInput, draw_samples
from millstream.plugins.convert.onnx_export import import_torch, reason
from millstream.services.errors import Failure, invalid
from millstream.services.ingest.file_kind import zip_names
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

MEMBERS_MAX = 100_000
TEXT_BYTES_MAX = 64 << 20  # of all code, and of one pickle
_MEMBER = re.compile(
    r"data\.pkl|constants\.pkl|version|byteorder|\.data/(?:version|serialization_id)|\.storage_alignment"
    r"|\.format_version|code/[\w./-]+\.py(?:\.debug_pkl)?|(?:data|constants|traced_inputs)/\d+"
    r"|traced_inputs\.pkl|extra/[\w./-]+"
)
_NAMED = re.compile(
    r"__torch__\S* \w+|torch\.jit\._pickle \w+|collections OrderedDict|torch\._utils _rebuild_\w+"
    r"|torch (?:[A-Z][a-zA-Z0-9]*Storage|Tensor|Size|device|[a-z]+\d+|bool)|torch\._tensor _rebuild_from_type_v2"
)
#: operators that reach files or give up the interpreter, and namespaces of operators that PyTorch has
_FILES = re.compile(r"\btorch\.(?:from_file|save|load|hub|package)\b|\bops\.aten\.(?:from_file|save)\b")
_NAMESPACE = re.compile(r"\bops\.(\w+)\.")
_NAMESPACES = frozenset({"aten", "prim", "prims", "quantized", "torchvision", "inductor"})


class TorchScriptImporter(Importer):
    """The importer of what torch.jit.save wrote."""

    name = "TorchScript"
    extra = "pytorch"
    modules = ("torch", "onnxscript")
    rehearsal = "millstream.plugins.convert.onnx_export:load_torch"

    def recognises(self, source: Source) -> bool:
        return is_script_file(source.path)

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

    def answer(arrays: Sequence[Array]) -> dict[str, Array]:
        with torch.inference_mode():
            found = module(*(torch.from_numpy(np.array(array)) for array in arrays))
        if isinstance(found, torch.Tensor):
            found = [found]
        pairs = found.items() if isinstance(found, dict) else ((f"output_{at}", one) for at, one in enumerate(found))
        outputs = dict(pairs)
        if not outputs or not all(isinstance(tensor, torch.Tensor) for tensor in outputs.values()):
            raise invalid("the model returns something else than tensors, a tuple of them or a dictionary of them")
        return {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in outputs.items()}

    given = [ModelInput(one.name, one.datatype, [None if size == -1 else size for size in one.shape]) for one in inputs]
    return draw_samples(given, answer, "the inputs that are declared")


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


def is_script_file(path: Path) -> bool:
    """Return whether a file is a zip with the layout of TorchScript. Raises OSError."""
    names = set(zip_names(path, MEMBERS_MAX + 1))
    roots = {name.partition("/")[0] for name in names}
    return any({f"{root}/data.pkl", f"{root}/constants.pkl"} <= names for root in roots)


def check_script(path: Path) -> None:
    """Raise Failure(INVALID) with one line for a file that is damaged, or does more than TorchScript of a model."""
    try:
        with zipfile.ZipFile(path) as archive:
            _check(archive, path.stat().st_size)
    except (zipfile.BadZipFile, EOFError, struct.error, NotImplementedError, UnicodeDecodeError) as error:
        raise invalid(f"the TorchScript file is damaged or was cut short: {str(error)[:200]}") from error


def _check(archive: zipfile.ZipFile, size: int) -> None:
    entries = archive.infolist()
    root = entries[0].filename.partition("/")[0]
    seen: set[str] = set()
    if len(entries) > MEMBERS_MAX or sum(entry.compress_size for entry in entries) > size:
        raise invalid("the TorchScript file is damaged: its files overlap or are too many")
    if sum(entry.file_size for entry in entries) > size + TEXT_BYTES_MAX:
        raise invalid(f"the TorchScript file has more than {TEXT_BYTES_MAX} bytes of code")
    for entry in entries:
        top, _, name = entry.filename.partition("/")
        if top != root or not _MEMBER.fullmatch(name) or ".." in name:
            raise invalid(f"{entry.filename[:80]!a} is no file of TorchScript")
        if name.casefold() in seen:
            raise invalid(f"the TorchScript file has {name[:80]!a} twice")
        seen.add(name.casefold())
        compressed = entry.compress_type != zipfile.ZIP_STORED
        if (compressed and not name.startswith("code/")) or entry.flag_bits & 1:
            raise invalid(f"{name[:80]!a} is compressed or encrypted: torch.jit.save does so with code alone")
        if name.endswith(("pkl", ".py")):
            if entry.file_size > TEXT_BYTES_MAX:
                raise invalid(f"{name[:80]!a} has more than {TEXT_BYTES_MAX} bytes")
            content = archive.read(entry)
            _check_pickle(name, content) if name.endswith("pkl") else _check_code(name, content.decode())


def _check_pickle(name: str, content: bytes) -> None:
    try:
        for opcode, argument, _ in pickletools.genops(content):
            hidden = opcode.name in {"STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}
            if hidden or (opcode.name == "GLOBAL" and not _NAMED.fullmatch(str(argument))):
                raise invalid(
                    f"{name[:80]!a} names {str(argument)[:80]!a}, which is no part of TorchScript and could execute "
                    "anything: save the model with torch.jit.save"
                )
    except ValueError as error:
        raise invalid(f"{name[:80]!a} is damaged: {str(error)[:100]}") from error


def _check_code(name: str, code: str) -> None:
    reached = _FILES.search(code)
    if reached is not None:
        raise invalid(f"{name[:80]!a} calls {reached[0]}, which reads or writes files")
    for namespace in _NAMESPACE.findall(code):
        if namespace not in _NAMESPACES:
            raise invalid(f"{name[:80]!a} calls operators of {namespace[:80]!a}, a library that PyTorch does not have")
