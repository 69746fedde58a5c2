"""Imports Keras 3 (.keras), with PyTorch as its backend: TensorFlow is not needed.

zip ─> config.json read without Keras: code and foreign classes refused ─> load_model, safe mode ─> samples ─> ONNX
"""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from millstream.plugins.convert.base import SCRATCH, Imported, Importer
from millstream.plugins.convert.drawn_samples import draw_samples, model_input
from millstream.plugins.convert.onnx_export import CannotExport, Export, export, import_torch, sample
from millstream.services.errors import Failure, invalid
from millstream.services.ingest.file_kind import zip_names
from millstream.services.ingest.importers import Array, ImportOptions, Source

CONFIG, WEIGHTS = "config.json", "model.weights.h5"
CONFIG_BYTES_MAX = 64 << 20
_CUSTOM = (
    "is a class of your own, which the gateway does not have: export the model where it runs, "
    "model.export('model.onnx', format='onnx')"
)


class KerasImporter(Importer):
    """The importer of what model.save('model.keras') wrote."""

    name = "Keras"
    extra = "keras"
    modules = ("keras", "torch", "onnxscript", "h5py")
    rehearsal = "millstream.plugins.convert.onnx_export:load_torch"

    def recognises(self, source: Source) -> bool:
        return {CONFIG, WEIGHTS} <= set(zip_names(source.path))

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        check_config(_config(source.path))
        torch = import_torch()
        keras = _import_keras()
        model = _load(keras, source)
        inputs, found = getattr(model, "input", model.inputs[0]), getattr(model, "output", None)  # Sequential has none
        names = _unique([_name(tensor, inputs, tensor.name) for tensor in model.inputs], ())
        outputs = _unique([_name(tensor, found, _layer(tensor)) for tensor in model.outputs], names)
        served = _served(torch, keras, model, inputs)
        taken = [model_input(name, str(one.dtype), one.shape) for name, one in zip(names, model.inputs, strict=True)]

        def answer(arrays: Sequence[Array]) -> dict[str, Array]:
            return dict(sample(torch, served, names, outputs, arrays).outputs)

        samples = draw_samples(taken, answer)
        variable = [
            {axis: torch.export.Dim.DYNAMIC for axis, size in enumerate(tensor.shape) if size is None}
            for tensor in model.inputs
        ]
        what = Export(
            served, names, outputs, tuple(map(torch.from_numpy, samples[0].inputs.values())), (tuple(variable),)
        )
        try:
            files = export(torch, what, source.folder)
        except CannotExport as error:
            raise invalid(f"the Keras model cannot be exported to ONNX: {error}") from error
        versions = f"keras {keras.__version__}, torch {torch.__version__}"
        return Imported(files[0], "onnx", samples, versions, files=files[1:], atol=1e-4)


def check_config(document: Any) -> None:
    """Raise Failure(INVALID) for a configuration that has code or classes of others than Keras."""
    for entry in _objects(document):
        name = str(entry.get("class_name"))
        if name in {"__lambda__", "Lambda"}:
            raise invalid(
                "the model has a Lambda layer, which is code that Keras would execute: use a layer of Keras in its "
                "place, or export the model where it runs, model.export('model.onnx', format='onnx')"
            )
        registered = entry.get("registered_name")
        module = entry.get("module")
        if module == "builtins" and name != "function":
            continue
        if "config" in entry and isinstance(module, str | None) and name != "None":
            foreign = module is not None and module.partition(".")[0] != "keras"
            if foreign or (module is None and registered):
                raise invalid(f"{str(registered or f'{module}.{name}')[:80]!a} {_CUSTOM}")


def _objects(document: Any) -> Iterator[dict[str, Any]]:
    """Yield all serialized objects in a configuration, however deep."""
    pending = [document]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if "class_name" in value:
                yield value
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)


def _config(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if any(entry.filename.startswith("/") or ".." in entry.filename.split("/") for entry in entries):
                raise invalid("the Keras file has a member that leads out of the archive")
            if archive.getinfo(CONFIG).file_size > CONFIG_BYTES_MAX:
                raise invalid(f"{CONFIG} of the Keras file has more than {CONFIG_BYTES_MAX} bytes")
            return json.loads(archive.read(CONFIG))
    except (zipfile.BadZipFile, EOFError, struct.error, ValueError, RecursionError, NotImplementedError) as error:
        raise invalid(f"the Keras file is damaged: {str(error)[:200]}") from error


def _import_keras() -> Any:
    try:
        import keras
    except ImportError as error:
        raise invalid(f"Keras cannot be loaded where the gateway runs ({error}): install millstream[keras]") from error
    return keras


def _load(keras: Any, source: Source) -> Any:
    # Keras asks for this ending and may unpack beside the file; the sandbox allows no links between folders.
    keras_file = source.folder / SCRATCH / "model.keras"
    shutil.copyfile(source.path, keras_file)
    try:
        model = keras.saving.load_model(str(keras_file), compile=False, safe_mode=True)
        if not getattr(model, "inputs", None):
            raise invalid("the model has no inputs yet: call it once, or build it, before it is saved")
    except (MemoryError, Failure):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise invalid(f"Keras {keras.__version__} cannot load the model: {text}") from error
    finally:
        keras_file.unlink()
    return model


def _name(tensor: Any, structure: Any, layer: str) -> str:
    """Return the name of an input or output: its key, if the model has them in a dictionary, else its layer's."""
    keys = structure.items() if isinstance(structure, dict) else ()
    return next((str(key) for key, value in keys if value is tensor), layer)


def _layer(tensor: Any) -> str:
    """Return the name of the layer or operation that computes an output."""
    return str(tensor._keras_history.operation.name)


def _unique(names: Sequence[str], taken: Sequence[str]) -> list[str]:
    """Return the names, with a number behind those that an earlier one has: a layer may be used several times."""
    found: list[str] = []
    for name in names:
        numbered = (f"{name}_{at}" if at else name for at in count())
        found.append(next(one for one in numbered if one not in taken and one not in found))
    return found


def _served(torch: Any, keras: Any, model: Any, inputs: Any) -> Any:
    """Return a module that takes the inputs by position and returns all outputs, in the order of the model's lists.

    `inputs`: the structure in which the model takes them.
    """

    class Served(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *arguments: Any) -> Any:
            given = keras.tree.pack_sequence_as(inputs, list(arguments))
            return tuple(keras.tree.flatten(self.model(given, training=False)))

    return Served().eval()
