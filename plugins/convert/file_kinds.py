"""What files of frameworks are that no importer takes as they are, and what their owner can do: for refusals.

Sources: the formats' specifications and writers (torch.save, safetensors, Keras 3, GGUF, TFLite).
"""

from __future__ import annotations

import re

from millstream.services.ingest.file_kind import FileKind, FileKinds

_TORCH = "torch.onnx.export(model, (example_input,), 'model.onnx')"
_SCIKIT = "open('model.onnx', 'wb').write(skl2onnx.to_onnx(model, X[:1]).SerializeToString())"
_ONNXMLTOOLS = "onnxmltools.convert_{0}(model, initial_types=[('x', FloatTensorType([None, columns]))])"

_OPENVINO = FileKind("an OpenVINO model", "export the model it was converted from to ONNX")
_XGBOOST = FileKind("an XGBoost model", f"load it in Python and export it: {_ONNXMLTOOLS.format('xgboost')}")
_LIGHTGBM = FileKind("a LightGBM model", f"load it in Python and export it: {_ONNXMLTOOLS.format('lightgbm')}")
_CATBOOST = FileKind(
    "a CatBoost model", "load it in Python and export it: model.save_model('model.onnx', format='onnx')"
)
_PICKLED_SCIKIT = FileKind("a pickle of a scikit-learn model", f"load it where it was made and export it: {_SCIKIT}")
_PICKLED_TORCH = FileKind("a pickle of a PyTorch model", f"load it where it was made and export it: {_TORCH}")
_TORCHSCRIPT = FileKind("a TorchScript file", f"export the model that it was made from: {_TORCH}")
_TORCH_WEIGHTS = FileKind("a PyTorch file (torch.save)", f"load it into its model class and export it: {_TORCH}")
_TORCH_EXPORTED = FileKind(
    "a program of torch.export of PyTorch 2.7 or earlier",
    "export it again with PyTorch 2.9 or later: torch.export.save(program, 'model.pt2')",
)
_SAFETENSORS = FileKind(
    "a safetensors file", f"it has weights and no graph: load it into its model class and export that: {_TORCH}"
)
_GGUF = FileKind("a GGUF model of llama.cpp", "export the model it was converted from to ONNX")
_KERAS = FileKind("a Keras model", "load it in Keras and export it: model.export('model.onnx', format='onnx')")
_HDF5 = FileKind(
    "an HDF5 file, as Keras writes it", "convert it: python -m tf2onnx.convert --keras model.h5 --output model.onnx"
)
_SAVED_MODEL = FileKind(
    "a TensorFlow SavedModel",
    "push its folder or an archive of what is in it; or convert that: "
    "python -m tf2onnx.convert --saved-model FOLDER --output model.onnx",
)
_FROZEN_GRAPH = FileKind(
    "a TensorFlow graph",
    "convert it: python -m tf2onnx.convert --graphdef graph.pb --inputs x:0 --outputs y:0 --output model.onnx",
)
_TFLITE = FileKind("a TensorFlow Lite model", "convert it: python -m tf2onnx.convert --tflite FILE --output model.onnx")
_COREML = FileKind("a Core ML package", "export the model it was converted from to ONNX")
_MAR = FileKind("a TorchServe archive", f"export its model: {_TORCH}")
_MLFLOW = FileKind("an MLflow model", "log it with mlflow.onnx, or export its model to ONNX")

_TENSORFLOW_MARKS = (b"VarHandleOp", b"AssignVariableOp", b"MergeV2Checkpoints", b'"\x05serve', b"saved_model")
_FROZEN = re.compile(
    rb"\x0a(?:[\x00-\x7f]|[\x80-\xff][\x01-\x7f])\x0a.{2,64}?\x12.(?:Placeholder|Const|NoOp)", re.DOTALL
)


def _recognise(head: bytes, size: int | None) -> FileKind | None:
    if len(head) >= 10 and head[8:9] == b"{":
        header_bytes = int.from_bytes(head[:8], "little")
        if size is None or 2 <= header_bytes <= size - 8:
            return _SAFETENSORS
    # SavedModel: schema version 1, then a graph. In an ONNX file this would be IR version 1, of 2017.
    if head.startswith(b"\x08\x01\x12") and any(mark in head for mark in _TENSORFLOW_MARKS):
        return _SAVED_MODEL
    if _FROZEN.match(head):
        return _FROZEN_GRAPH
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:4096]
    if start.lower().startswith(b"<?xml") and b"<net " in start.lower():
        return _OPENVINO
    return _XGBOOST if start.startswith(b"{") and b'"learner"' in start else None


KINDS = FileKinds(
    magic=(
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", _TORCH_WEIGHTS),  # the magic number of torch.save before 1.6
        (b"\x89HDF\r\n\x1a\n", _HDF5),
        (b"GGUF", _GGUF),
        (b"CBM1", _CATBOOST),
        (b"tree\nversion=", _LIGHTGBM),
        (b"binf", _XGBOOST),
        (b"{L\x00\x00\x00\x00\x00\x00", _XGBOOST),  # UBJSON
    ),
    flatbuffers={b"TFL3": _TFLITE},
    members=(
        (r"(.*/)?MAR-INF/MANIFEST\.json", _MAR),
        (r"(.*/)?MLmodel", _MLFLOW),
        (r"[^/]+/constants\.pkl", _TORCHSCRIPT),
        (r"([^/]+/)?serialized_exported_program\.(json|pt)", _TORCH_EXPORTED),
        (r"[^/]+/data\.pkl", _TORCH_WEIGHTS),
        (r"model\.weights\.h5", _KERAS),
        (r"(.*/)?saved_model\.pb(txt)?", _SAVED_MODEL),
        (r"(.*/)?(.*\.mlpackage/.*|[^/]+\.mlmodel)", _COREML),
        (r"(.*/)?[^/]+\.safetensors", _SAFETENSORS),
        (r"(.*/)?[^/]+\.(pt|pth|ckpt|bin)", _TORCH_WEIGHTS),
        (r"(.*/)?[^/]+\.(h5|hdf5)", _HDF5),
        (r"(.*/)?[^/]+\.keras", _KERAS),
        (r"(.*/)?[^/]+\.tflite", _TFLITE),
        (r"(.*/)?[^/]+\.gguf", _GGUF),
    ),
    pickled=(
        (b"sklearn", _PICKLED_SCIKIT),
        (b"xgboost", _XGBOOST),
        (b"lightgbm", _LIGHTGBM),
        (b"catboost", _CATBOOST),
        (b"torch", _PICKLED_TORCH),
    ),
    recognise=_recognise,
)
