"""Imports TensorFlow SavedModels and TensorFlow Lite models, and folders with numbered versions of them.

with TensorFlow and tf2onnx: ─> ONNX, which workers of every pool run; samples are TensorFlow's own answers
without them, or for operators that ONNX has not: OpenVINO reads both ─> its own format, for pools of that backend
folders that are numbers (TensorFlow Serving) ─> the highest ─> what it holds; the other versions become a note
What a TensorFlow Lite model says about itself is read with the standard library alone. Source: schema.fbs (TFL3).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millstream.plugins.convert import openvino_ir
from millstream.plugins.convert.base import Imported, Importer
from millstream.plugins.convert.drawn_samples import ModelInput, draw_samples, model_input
from millstream.plugins.convert.held import convert_held
from millstream.services.errors import Failure, invalid
from millstream.services.ingest.importers import IMPORTED, Array, ImportOptions, Members, Sample, Source
from millstream.services.ingest.layout import shown
from millstream.services.model.flatbuffer import CutShort, Data, NoTable, Table

OPSET = 18
SIGNATURE = "serving_default"
DOCUMENT = "saved_model.pb"
#: of a SavedModel's folder
MEMBERS = (
    DOCUMENT, "saved_model.pbtxt", "fingerprint.pb", "keras_metadata.pb", "variables/*", "assets/**/*",
    "assets.extra/**/*",
)  # fmt: skip
_CONVERTERS = ("tensorflow", "tf2onnx")
_MESSAGE_CHARACTERS_MAX = 400
_VERSIONED = ("saved_model.pb", "saved_model.pbtxt", "model.tflite")
IDENTIFIER = b"TFL3"  # bytes 4 to 8
_CODES, _GRAPHS, _SIGNATURES = 1, 2, 7
_FLEX = "Flex"  # begins the names of TensorFlow's own operators


def needed_modules() -> tuple[str, ...]:
    """Return what must be importable: TensorFlow and tf2onnx where they are installed, else OpenVINO."""
    return _CONVERTERS if all(map(find_spec, _CONVERTERS)) else ("openvino",)


class SavedModelImporter(Importer):
    """Imports folders that tf.saved_model.save wrote: one signature, serving_default if there are several."""

    name = "TensorFlow"
    extra = "tensorflow"
    marks = frozenset({"saved_model.pb"})

    @property
    def modules(self) -> tuple[str, ...]:
        return needed_modules()

    def recognises(self, source: Source) -> bool:
        """Return whether the folder has a saved_model.pb."""
        return source.path.is_dir() and (source.path / DOCUMENT).is_file()

    def members(self, folder: Path) -> Members:
        """Return what tf.saved_model.save writes."""
        return Members(MEMBERS)

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        """Return the model as ONNX or in OpenVINO's format. Raises Failure(INVALID)."""
        if needed_modules() != _CONVERTERS:
            return openvino_ir.convert(source, "tf")
        import tensorflow as tf

        key, function, loaded = _signature(tf, source.path)
        specs = function.structured_input_signature[1]
        given = [_input(name, spec) for name, spec in specs.items()]
        samples = draw_samples(given, lambda arrays: _answer(tf, function, specs, arrays))
        del loaded  # the function refers to its variables weakly: until here they were needed
        return _converted(source, "tf", samples, None, key)


class TensorFlowLiteImporter(Importer):
    """Imports .tflite files that have built-in operators alone."""

    name = "TensorFlow Lite"
    extra = "tensorflow"
    executes = False

    @property
    def modules(self) -> tuple[str, ...]:
        return needed_modules()

    def recognises(self, source: Source) -> bool:
        """Return whether the file begins as TensorFlow Lite's files do."""
        if not source.path.is_file():
            return False
        with source.path.open("rb") as file:
            return is_tflite(file.read(8))

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        """Return the model as ONNX or in OpenVINO's format. Raises Failure(INVALID)."""
        model = read_tflite(source.path.read_bytes())
        if needed_modules() != _CONVERTERS:
            return openvino_ir.convert(source, "tflite", model)
        import tensorflow as tf

        lite = _Interpreter(tf, source.path, model)
        return _converted(source, "tflite", draw_samples(lite.inputs, lite.answer), model, "")


class VersionedFolderImporter(Importer):
    """The importer of folders with numbered versions of a SavedModel."""

    name = "TensorFlow Serving"
    described = True

    def recognises(self, source: Source) -> bool:
        return bool(_versions(source.path))

    def members(self, folder: Path) -> Members:
        *others, newest = (version.name for version in _versions(folder))
        notes = (f"The folder has the versions {shown(others)}, too: push each as a version of its own.",)
        return Members([f"{newest}/{name}" for name in (*MEMBERS, *_VERSIONED)], notes if others else ())

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        newest = _versions(source.path)[-1]
        path = newest / "model.tflite" if (newest / "model.tflite").is_file() else newest
        return convert_held(source, path, options, f"version {newest.name} of the folder")


def _versions(path: Path) -> list[Path]:
    """Return the folders of versions, the newest last; none if the folder has anything else at its top."""
    if not path.is_dir():
        return []
    entries = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    if not entries or not all(entry.name.isdecimal() and entry.name.isascii() and entry.is_dir() for entry in entries):
        return []
    held = [entry for entry in entries if any((entry / name).is_file() for name in _VERSIONED)]
    return sorted(held, key=lambda entry: int(entry.name)) if len(held) == len(entries) else []


def _converted(
    source: Source, front_end: str, samples: Sequence[Sample], lite: TfliteModel | None, key: str
) -> Imported:
    """Return the model as ONNX; in OpenVINO's format, if tf2onnx refuses it and OpenVINO is installed."""
    import tensorflow as tf
    import tf2onnx

    producer = f"tensorflow {tf.__version__}, tf2onnx {tf2onnx.__version__}"
    try:
        path = _to_onnx(source, lite, key)
    except Failure as failure:
        if find_spec("openvino") is None:
            raise
        try:
            found = openvino_ir.convert(source, front_end, lite, samples)
        except Failure:
            raise failure from None  # what it says about ONNX tells more
        return found._replace(notes=(*found.notes, f"It is no ONNX: {failure.message}."))
    return Imported(path, "onnx", samples, producer)


def _to_onnx(source: Source, lite: TfliteModel | None, key: str) -> Path:
    """Write the model as ONNX and return its path. Calls what the command line of tf2onnx calls."""
    from tf2onnx import convert, tf_loader

    try:
        if lite is not None:
            names = {tensor: name for name, tensor in {**lite.inputs, **lite.outputs}.items()}
            model, _ = convert._convert_common(
                None, tflite_path=str(source.path), opset=OPSET, continue_on_error=False, tensors_to_rename=names
            )
        else:
            graph, inputs, outputs, tables, names = tf_loader.from_saved_model(
                str(source.path), None, None, tag="serve", signatures=[key],
                return_initialized_tables=True, return_tensors_to_rename=True,
            )  # fmt: skip
            model, _ = convert._convert_common(
                graph, opset=OPSET, continue_on_error=False, input_names=inputs, output_names=outputs,
                initialized_tables=tables, tensors_to_rename=names,
            )  # fmt: skip
    except Exception as error:
        raise invalid(f"tf2onnx cannot convert the model: {_line(error)}") from error
    foreign = sorted(_foreign(model.graph))
    if foreign:
        raise invalid(f"tf2onnx has no conversion for the operators {', '.join(foreign[:5])}")
    path = source.folder / IMPORTED / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def _foreign(graph: Any) -> set[str]:
    """Return the operators that ONNX has not: tf2onnx leaves those that it cannot convert as they were."""
    import onnx.defs

    found = {node.op_type for node in graph.node if not onnx.defs.has(node.op_type, node.domain)}
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found |= _foreign(attribute.g)
    return found


def _signature(tensorflow: Any, path: Path) -> tuple[str, Any, Any]:
    """Return key and function of the signature to serve, and the loaded model. Raises Failure(INVALID)."""
    try:
        loaded = tensorflow.saved_model.load(str(path), tags=["serve"])
    except Exception as error:
        raise invalid(
            f"TensorFlow {tensorflow.__version__} cannot load the SavedModel: {_line(error).replace(str(path), '')}; "
            "a complete one has saved_model.pb and the folder variables, and no custom operators"
        ) from error
    keys = sorted(key for key in loaded.signatures if not key.startswith("_"))
    if not keys:
        raise invalid("the SavedModel has no signature: save it with tf.saved_model.save(model, folder, signatures=…)")
    if SIGNATURE not in keys and len(keys) > 1:
        names = ", ".join(keys)[:200]
        raise invalid(f"the SavedModel has several signatures ({names!a}): call the one to serve {SIGNATURE}")
    key = SIGNATURE if SIGNATURE in keys else keys[0]
    return key, loaded.signatures[key], loaded


def _input(name: str, spec: Any) -> ModelInput:
    if spec.shape.rank is None:
        raise invalid(f"input {name[:80]!r} has no number of dimensions: give its TensorSpec a shape")
    dtype = "str" if spec.dtype.name == "string" else spec.dtype.name
    return model_input(name, dtype, spec.shape.as_list())


def _answer(tensorflow: Any, function: Any, specs: Mapping[str, Any], arrays: Sequence[Array]) -> dict[str, Array]:
    pairs = zip(specs.items(), arrays, strict=True)
    given = {name: tensorflow.constant(array, spec.dtype) for (name, spec), array in pairs}
    return {name: _array(value.numpy()) for name, value in function(**given).items()}


def _array(value: Any) -> Array:
    array = np.asarray(value)
    if array.dtype != object:
        return array
    return np.array([one.decode("utf-8", "replace") for one in array.ravel().tolist()]).reshape(array.shape)


class _Interpreter:
    """TensorFlow Lite's interpreter. Raises Failure(INVALID) if it cannot load the model."""

    def __init__(self, tensorflow: Any, path: Path, model: TfliteModel) -> None:
        try:
            with warnings.catch_warnings():  # that another package is to replace it
                warnings.simplefilter("ignore")
                self._interpreter = tensorflow.lite.Interpreter(model_path=str(path))
            details = [self._interpreter.get_input_details(), self._interpreter.get_output_details()]
        except Exception as error:
            raise invalid(f"TensorFlow Lite cannot load the model: {_line(error)}") from error
        by_tensor = [{one["name"]: one for one in some} for some in details]
        self._inputs = {name: by_tensor[0][tensor] for name, tensor in model.inputs.items()}
        self._outputs = {name: by_tensor[1][tensor] for name, tensor in model.outputs.items()}
        self.inputs = [self._input(name, one) for name, one in self._inputs.items()]

    def _input(self, name: str, details: Any) -> ModelInput:
        dims = [None if dim < 0 else int(dim) for dim in details.get("shape_signature", details["shape"])]
        return model_input(name, np.dtype(details["dtype"]).name, dims)

    def answer(self, arrays: Sequence[Array]) -> dict[str, Array]:
        """Return the outputs for these inputs."""
        lite = self._interpreter
        pairs = [(one["index"], array) for one, array in zip(self._inputs.values(), arrays, strict=True)]
        for index, array in pairs:
            lite.resize_tensor_input(index, array.shape)
        lite.allocate_tensors()
        for index, array in pairs:
            lite.set_tensor(index, array)
        lite.invoke()
        return {name: np.array(lite.get_tensor(one["index"])) for name, one in self._outputs.items()}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MESSAGE_CHARACTERS_MAX] or type(error).__name__


class TfliteModel(NamedTuple):
    """A model's inputs and outputs.

    Args:
        inputs, outputs: name for clients -> name of the tensor in the file; names of the signature, if it has one.
    """

    inputs: dict[str, str]
    outputs: dict[str, str]


def is_tflite(head: bytes) -> bool:
    """Return whether a file that begins with `head` is a TensorFlow Lite model."""
    return head[4:8] == IDENTIFIER


def read_tflite(data: Data) -> TfliteModel:
    """Return the inputs and outputs. Raises Failure(INVALID) for damaged files and for operators that cannot be run."""
    try:
        model = Table(data)
        _check_operators(model)
        graphs = model.tables(_GRAPHS)
        if not graphs:
            raise invalid("the TensorFlow Lite model has no graph")
        return _tensors_of(model, graphs[0])
    except CutShort:
        raise invalid("the TensorFlow Lite model was cut short: copy or download it again") from None
    except (NoTable, IndexError):
        raise invalid("the TensorFlow Lite model is damaged") from None


def _check_operators(model: Table) -> None:
    custom = [name for code in model.tables(_CODES) if (name := code.text(1))]
    flex = [name for name in custom if name.startswith(_FLEX)]
    if flex:
        raise invalid(
            f"the model has operators of TensorFlow itself ({', '.join(flex[:3])[:200]!a}), which no TensorFlow Lite "
            "converter takes: push the SavedModel that it was made from, or convert it without SELECT_TF_OPS"
        )
    if custom:
        raise invalid(
            f"the model has custom operators ({', '.join(custom[:3])[:200]!a}): convert it with built-in ones alone"
        )


def _tensors_of(model: Table, graph: Table) -> TfliteModel:
    names = [tensor.text(3) for tensor in graph.tables(0)]
    of_graph = [one for one in model.tables(_SIGNATURES) if one.number(4, "<I") == 0]
    if len(of_graph) > 1:
        keys = ", ".join(one.text(2) for one in of_graph)[:200]
        of_graph = [one for one in of_graph if one.text(2) == "serving_default"]
        if not of_graph:
            raise invalid(f"the model has several signatures ({keys!a}): convert it with one, or serving_default")
    if of_graph:
        inputs, outputs = (
            {one.text(0): names[one.number(1, "<I")] for one in of_graph[0].tables(field)} for field in (0, 1)
        )
    else:
        inputs, outputs = ({names[index]: names[index] for index in graph.numbers(field)} for field in (1, 2))
    return TfliteModel(inputs, outputs)
