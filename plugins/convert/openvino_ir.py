"""Converts models that OpenVINO reads to its own format, with the names of the model's signature.

SavedModel folder or .tflite ─> OpenVINO's front end ─> model.xml, model.bin
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.plugins.convert.base import Imported
from millstream.plugins.convert.drawn_samples import ModelInput, draw_samples, model_input
from millstream.services.errors import invalid
from millstream.services.ingest.importers import IMPORTED, Array, Sample, Source

if TYPE_CHECKING:
    from millstream.plugins.convert.tensorflow import TfliteModel

FORMAT = "openvino"
MODEL = "model.xml"
WEIGHTS = "model.bin"
_KINDS = {"tf": "SavedModel", "tflite": "TensorFlow Lite model"}
_NAMES = {"f32": "float32", "f16": "float16", "f64": "float64", "boolean": "bool", "string": "str"} | {
    f"{letter}{bits}": f"{name}{bits}" for letter, name in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)
}


def convert(
    source: Source, front_end: str, lite: TfliteModel | None = None, samples: Sequence[Sample] = ()
) -> Imported:
    """Return the model in OpenVINO's format. Raises Failure(INVALID).

    Args:
        source: the folder or file.
        front_end: "tf" or "tflite".
        lite: names of a TensorFlow Lite model.
        samples: answers of TensorFlow, to compare with; none: OpenVINO's own, and a note that says so.
    """
    library = _library()
    folder = source.folder / IMPORTED
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MODEL
    if lite is None:
        model = _read(source.path, front_end)
    else:  # the front end reads only files that are called so
        named = folder / "model.tflite"
        shutil.copyfile(source.path, named)
        model = _read(named, front_end)
        _rename(model, lite)
    library.save_model(model, str(path), compress_to_fp16=False)
    (folder / "model.tflite").unlink(missing_ok=True)  # the front end reads weights until here
    notes: tuple[str, ...] = ()
    if not samples:
        samples = _samples(library, path)
        notes = ("TensorFlow is not installed where the gateway runs, so its own answers were not compared.",)
    version = library.get_version().partition("-")[0]
    return Imported(path, FORMAT, samples, f"openvino {version}", notes, [folder / WEIGHTS])


def _read(path: Path, front_end: str) -> Any:
    from openvino.frontend import FrontEndManager

    try:
        reader = FrontEndManager().load_by_framework(front_end)
        return reader.convert(reader.load(str(path)))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        telling = [line.lstrip("- ") for line in lines if line.startswith(("--", "No conversion"))] or lines[-1:]
        reason = " ".join(telling).replace(str(path), "")[:400]
        raise invalid(f"OpenVINO cannot read the {_KINDS[front_end]}: {reason}") from error


def _rename(model: Any, lite: TfliteModel | None) -> None:
    """Give inputs and outputs the names of the signature, which are those of a SavedModel already."""
    if lite is None:
        return
    for ports, names in ((model.inputs, lite.inputs), (model.outputs, lite.outputs)):
        by_tensor = {tensor: name for name, tensor in names.items()}
        for port in ports:
            found = [by_tensor[name] for name in port.get_names() if name in by_tensor]
            if found:
                port.get_tensor().set_names(set(found))


def _samples(library: Any, path: Path) -> list[Sample]:
    """Return OpenVINO's own answers for the file that was written."""
    compiled = library.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    names = [port.get_any_name() for port in compiled.inputs]

    def answer(arrays: Sequence[Array]) -> dict[str, Array]:
        found = compiled(dict(zip(names, arrays, strict=True)))
        return {port.get_any_name(): np.array(found[port]) for port in compiled.outputs}

    return draw_samples([_input(port) for port in compiled.inputs], answer)


def _input(port: Any) -> ModelInput:
    shape, name = port.get_partial_shape(), port.get_any_name()
    if shape.rank.is_dynamic:
        raise invalid(f"input {name[:80]!r} has no number of dimensions")
    element = port.get_element_type().get_type_name()
    dims = [None if dim.is_dynamic else dim.get_length() for dim in shape]
    return model_input(name, _NAMES.get(element, element), dims)


def _library() -> Any:
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type] # reports each import to its makers
    import openvino

    return openvino
